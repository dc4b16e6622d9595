"""Less effort where rows ask for less: the same bits as full effort, and never less than they ask for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.inversion import NUMBERS, draw_draft
from dspark_jax.decode.plan import RowPlan, StepPlan
from dspark_jax.decode.sampling import Stream, uniform
from dspark_jax.decode.shaping import shaped_logits
from dspark_jax.decode.state import TokenCounts
from dspark_jax.decode.verify import LogitRows, verify_coupled, verify_standard
from tests.decode.tables import sampling_rows
from tests.quick_jit import quick_jit

ROWS, DRAFTS, VOCAB = 64, 3, 24


@partial(quick_jit, static_argnames="effort")
def judge(target, drafter, rows, *, effort):
    """Tokens drawn from `drafter` [R, V], and both verdicts on them by `target` [R * (G + 1), V]."""
    slots, place = jnp.arange(ROWS), jnp.full(ROWS, 40)
    counts = TokenCounts(
        output=jnp.ones((ROWS, VOCAB), jnp.int32), prompt=jnp.zeros((ROWS, VOCAB), bool)
    )
    q = shaped_logits(drafter, rows, place, slots, counts, None, effort)
    numbers = uniform(rows, place, Stream.DRAFT, (NUMBERS,))
    tokens = draw_draft(q, rows, numbers, effort=effort)
    owner = jnp.arange(ROWS * (DRAFTS + 1)) // (DRAFTS + 1)
    p = shaped_logits(target, rows.take(owner), place[owner], slots[owner], counts, None, effort)
    drafts = jnp.stack([tokens] * DRAFTS, axis=1)
    own = jnp.take_along_axis(jax.nn.log_softmax(q), drafts, axis=1)
    where = LogitRows(slots * (DRAFTS + 1), jnp.full(ROWS, DRAFTS), place)
    standard = verify_standard(p, drafts, own, lambda k: q, where, rows, effort=effort)
    return tokens, standard, verify_coupled(p, drafts, where, rows, owner, effort=effort)


@pytest.mark.parametrize("greedy_every", [1, 3, ROWS + 1], ids=["greedy", "mixed", "drawn"])
def test_what_suffices_gives_the_same_bits(greedy_every: int) -> None:
    rng = np.random.default_rng(greedy_every)
    target = rng.normal(0, 2, (ROWS * (DRAFTS + 1), VOCAB)).astype(np.float32)
    drafter = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    temperature = np.where(np.arange(1, ROWS + 1) % greedy_every == 0, 0.0, 0.7)
    rows = sampling_rows(ROWS, 1, temperature=temperature.astype(np.float32))
    expected = judge(target, drafter, rows, effort=Effort.AS_NEEDED)
    accept_lens = np.asarray(expected[1].accept_lens)
    assert 0 < accept_lens.sum() < DRAFTS * ROWS, "one side of the test only"
    for effort in (Effort.PLAIN, Effort.FULL):
        actual = judge(target, drafter, rows, effort=effort)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_doing_everything_leaves_rows_alone_that_do_not_ask() -> None:
    rng = np.random.default_rng(7)
    target = rng.normal(0, 2, (ROWS * (DRAFTS + 1), VOCAB)).astype(np.float32)
    drafter = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    turn = np.arange(ROWS) % 6
    rows = sampling_rows(
        ROWS,
        1,
        temperature=np.where(turn == 0, 0.0, 0.7).astype(np.float32),
        top_k=np.where(turn == 1, 3, 0).astype(np.int32),
        top_p=np.where(turn == 2, 0.8, 1.0).astype(np.float32),
        min_p=np.where(turn == 3, 0.2, 0.0).astype(np.float32),
        repetition_penalty=np.where(turn == 4, 1.5, 1.0).astype(np.float32),
        min_len=np.where(turn == 5, 99, 0).astype(np.int32),
    )
    rows = rows.replace(stop_ids=rows.stop_ids.at[:, 0].set(3))
    expected = judge(target, drafter, rows, effort=Effort.AS_NEEDED)
    actual = judge(target, drafter, rows, effort=Effort.FULL)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    plain = judge(target, drafter, rows, effort=Effort.PLAIN)
    asks_nothing = turn == 0
    np.testing.assert_array_equal(plain[0][asks_nothing], expected[0][asks_nothing])
    assert not np.array_equal(plain[0], expected[0]), "nobody asked for anything"


def effort_of(*rows: RowPlan) -> Effort:
    table = np.zeros((2, 1), np.int32)
    return StepPlan(rows=rows, page_table=table, budget=0, bucket=8, drafts=False).effort


def row(**fields) -> RowPlan:
    return RowPlan(slot=0, limit=20, prompt_len=3, **fields)


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_len": 5},
        {"wants_logprobs": True},
        {"wants_prompt_logprobs": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_one_row_that_asks_for_more_gets_it(field: dict) -> None:
    plain = (row(), row(temperature=0.8))
    assert effort_of() == effort_of(*plain) == Effort.PLAIN
    assert effort_of(*plain, row(temperature=0.8, **field)) == Effort.FULL
    # A greedy row is the most likely token whatever the filters keep.
    is_filter = next(iter(field)) in ("top_k", "top_p", "min_p")
    assert effort_of(*plain, row(**field)) == (Effort.PLAIN if is_filter else Effort.FULL)
