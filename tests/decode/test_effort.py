"""Less effort where rows ask for less: the same bits as full effort, and never less than they ask for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.sampling import Effort, Stream, draw, efforts, least_effort
from dspark_jax.decode.shaping import shaped_logits
from dspark_jax.decode.state import TokenCounts
from dspark_jax.decode.verify import LogitRows, verify_coupled, verify_standard
from dspark_jax.kernels.dispatch import Backend, Dispatch
from tests.decode.tables import sampling_rows
from tests.quick_jit import quick_jit

ROWS, DRAFTS, VOCAB = 64, 3, 24
TEMPERATURES = {
    Effort.GREEDY: np.zeros(ROWS, np.float32),
    Effort.PLAIN: np.where(np.arange(ROWS) % 3 == 0, 0.0, 0.7).astype(np.float32),
}


@quick_jit
def least(rows, also_full):
    return least_effort(rows, also_full)


@partial(quick_jit, static_argnames="effort")
def judge(target, drafter, rows, *, effort):
    """Tokens drawn from `drafter` [R, V], and both verdicts on them by `target` [R * (G + 1), V]."""
    slots, place = jnp.arange(ROWS), jnp.full(ROWS, 40)
    counts = TokenCounts(
        output=jnp.ones((ROWS, VOCAB), jnp.int32), prompt=jnp.zeros((ROWS, VOCAB), bool)
    )
    q = shaped_logits(drafter, rows, place, slots, counts, None, effort)
    tokens = draw(q, rows, place, Stream.DRAFT, place, effort=effort)
    owner = jnp.arange(ROWS * (DRAFTS + 1)) // (DRAFTS + 1)
    p = shaped_logits(target, rows.take(owner), place[owner], slots[owner], counts, None, effort)
    drafts = jnp.stack([tokens] * DRAFTS, axis=1)
    own = jnp.take_along_axis(jax.nn.log_softmax(q), drafts, axis=1)
    where = LogitRows(slots * (DRAFTS + 1), jnp.full(ROWS, DRAFTS), place)
    standard = verify_standard(p, drafts, own, lambda k: q, where, rows, effort=effort)
    return tokens, standard, verify_coupled(p, drafts, where, rows, owner, effort=effort)


@pytest.mark.parametrize("enough", TEMPERATURES, ids=lambda effort: effort.name.lower())
def test_what_suffices_gives_the_same_bits(enough: Effort) -> None:
    rng = np.random.default_rng(int(enough))
    target = rng.normal(0, 2, (ROWS * (DRAFTS + 1), VOCAB)).astype(np.float32)
    drafter = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    rows = sampling_rows(ROWS, 1, temperature=TEMPERATURES[enough])
    assert least(rows, False) == enough
    expected = judge(target, drafter, rows, effort=Effort.FULL)
    accept_lens = np.asarray(expected[1].accept_lens)
    assert 0 < accept_lens.sum() < DRAFTS * ROWS, "one side of the test only"
    for effort in Effort:
        if effort >= enough:
            actual = judge(target, drafter, rows, effort=effort)
            jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    "parameter",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
    ],
    ids=lambda parameter: next(iter(parameter)),
)
def test_one_row_that_asks_for_more_gets_it(parameter: dict) -> None:
    [(name, value)] = parameter.items()
    rows = sampling_rows(ROWS, 1, temperature=TEMPERATURES[Effort.PLAIN])
    column = getattr(rows, name)
    # Of these rows the first is greedy, the second is not.
    assert least(rows.replace(**{name: column.at[1].set(value)}), False) == Effort.FULL
    by_greedy = least(rows.replace(**{name: column.at[0].set(value)}), False)
    assert by_greedy == (Effort.FULL if "penalty" in name else Effort.PLAIN)
    assert least(rows, True) == Effort.FULL


def test_only_programs_for_a_gpu_tell_levels_apart() -> None:
    assert efforts(Dispatch()) == (Effort.FULL,)
    assert efforts(Dispatch(Backend.PALLAS, interpret=True)) == tuple(Effort)
