"""The target behind its caches: any steps, company and rejections give what one pass without a cache gives.

With rows in fp8 a sum in another order may round a row differently. So there the expectation comes from the same
program, for a request that is alone and has nothing rejected: programs of one shape add in one order.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.batch import batch_from_chunks
from tests.parity.compare import FLOAT32_MODEL, assert_close
from tests.parity.target import CachedTarget, Chunk, expect, make_twins, random_tokens, run_step
from tests.quick_jit import quick_jit
from tests.seeds import fresh_seed
from tests.torch_ref.configs import tiny_config

LENGTH = 60
TOKENS = 24
# Largest difference between buckets: the same sums in another order, on logits with a standard deviation near one.
REORDERED = 5e-6


@pytest.fixture(scope="module", params=[RowFormat.PLAIN, RowFormat.FP8], ids=["plain", "fp8"])
def row_format(request):
    return request.param


@pytest.fixture(scope="module")
def twins():
    return make_twins(tiny_config(index_topk=3), seed=3)


@pytest.fixture(scope="module")
def program():
    return quick_jit(run_step, static_argnames="cfg")


@pytest.fixture(scope="module")
def texts(twins, fresh_target, row_format):
    """Three texts, each with its logits and taps by the reference, or by the simplest steps."""
    texts = [random_tokens(twins.reference, LENGTH, seed) for seed in (10, 11, 12)]
    if row_format is RowFormat.PLAIN:
        return [(text, *expect(twins, text)) for text in texts]
    return [(text, *straight_pass(fresh_target(), text)) for text in texts]


def straight_pass(target: CachedTarget, text: list[int]) -> tuple[np.ndarray, ...]:
    """Logits and taps of a text that is fed in full steps, alone."""
    parts = [
        target.step([Chunk(0, text[i : i + TOKENS], len(text[i : i + TOKENS]))])[0]
        for i in range(0, LENGTH, TOKENS)
    ]
    return tuple(np.concatenate(part) for part in zip(*parts))


@pytest.fixture(scope="module")
def fresh_target(twins, program, row_format):
    return partial(
        CachedTarget,
        twins,
        max_len=LENGTH + 8,
        tokens=TOKENS,
        row_format=row_format,
        program=program,
    )


@pytest.fixture
def target(fresh_target):
    return fresh_target()


def test_random_steps_of_several_requests_with_rejections(target, texts):
    """One to eight tokens each, or a prompt chunk, any number accepted, the rest wrong guesses."""
    rng = np.random.default_rng(fresh_seed())
    slots = rng.permutation(4)[:3]
    while (target.lengths[slots] < LENGTH).any():
        chunks, chosen, room = [], [], TOKENS
        for i in rng.permutation(3):
            start, text = target.lengths[slots[i]], texts[i][0]
            most = min(room, 16 if start == 0 else 8)
            if start == LENGTH or most == 0 or rng.random() < 0.2:
                continue
            count = rng.integers(1, most + 1)
            accepted = min(rng.integers(1, count + 1), LENGTH - start)
            wrong = rng.integers(0, 128, count - accepted)
            chunks.append(Chunk(slots[i], [*text[start : start + accepted], *wrong], accepted))
            chosen.append((i, slice(start, start + accepted)))
            room -= count
        if not chunks:
            continue
        for (i, place), (logits, taps) in zip(chosen, target.step(chunks)):
            name = f"request {i} at {place}"
            assert_close(logits, texts[i][1][place], FLOAT32_MODEL, name)
            assert_close(taps, texts[i][2][place], FLOAT32_MODEL, name)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("longest", [1, 7, TOKENS])
def test_any_split_of_a_prompt(target, texts, longest, seed):
    rng = np.random.default_rng((seed, longest))
    split: list[int] = []
    while sum(split) < LENGTH:
        split.append(min(rng.integers((longest + 1) // 2, longest + 1), LENGTH - sum(split)))
    logits = target.prefill(2, texts[0][0], split)
    assert_close(logits, texts[0][1], FLOAT32_MODEL, f"split {split}")


def test_everything_rejected_then_repeated(target, texts):
    """Rejected tokens close windows and fill every ring slot that they may reach; nothing of it remains."""
    text, expected, _ = texts[0]
    target.prefill(1, text[:31], [24, 7])
    target.step([Chunk(1, [7] * 9, 0)])
    target.step([Chunk(1, [9] * 16, 0)])
    logits, _ = target.step([Chunk(1, text[31:55], 24)])[0]
    assert_close(logits, expected[31:55], FLOAT32_MODEL)


def test_a_slot_is_reused_without_a_trace(target, texts):
    target.prefill(0, texts[1][0], [24, 24, 12])
    target.lengths[0] = 0
    logits = target.prefill(0, texts[0][0], [5, 24, 24, 7])
    assert_close(logits, texts[0][1], FLOAT32_MODEL)


def assert_same_bits(actual, expected) -> None:
    """Trees of equal arrays, NaN included; NumPy finds an fp8 NaN different from itself."""
    bits = lambda leaf: np.asarray(leaf).view(np.uint8)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), actual, expected)


def two_requests(target, texts) -> list[Chunk]:
    target.prefill(0, texts[0][0][:30], [20, 10])
    target.prefill(3, texts[1][0][:41], [24, 17])
    return [Chunk(0, texts[0][0][30:36], 6), Chunk(3, texts[1][0][41:55], 14)]


def test_case_30_neighbours_rows_and_padding_change_nothing(target, texts):
    """The same tokens alone, beside another request, and in either row order: equal bit for bit."""
    chunks = two_requests(target, texts)
    run = partial(target.program, target.twins.params, cfg=target.twins.cfg)

    def logits_of(order: list[Chunk]) -> dict[int, np.ndarray]:
        batch, accepted = target.batch(order)
        flat = run(batch, target.cache, target.page_table, accepted).logits
        first = np.cumsum([0] + [len(chunk.token_ids) for chunk in order])
        return {c.slot: np.asarray(flat[a : a + len(c.token_ids)]) for c, a in zip(order, first)}

    together = logits_of(chunks)
    for order in (chunks[::-1], chunks[:1], chunks[1:]):
        for slot, logits in logits_of(order).items():
            np.testing.assert_array_equal(logits, together[slot])


def test_slots_and_pages_change_nothing(target, fresh_target, texts):
    """Every request moved to another slot and other pages: equal bit for bit."""
    chunks = two_requests(target, texts)
    before = [logits for logits, _ in target.step(chunks)]
    moved = fresh_target()
    moved.page_table = moved.page_table[::-1]
    moved.prefill(2, texts[0][0][:30], [20, 10])
    moved.prefill(1, texts[1][0][:41], [24, 17])
    after = moved.step([Chunk(2, *chunks[0][1:]), Chunk(1, *chunks[1][1:])])
    for (logits, _), expected in zip(after, before):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("row_format", [RowFormat.PLAIN], indirect=True, ids=["plain"])
def test_case_31_buckets_change_rounding_at_most(target, texts):
    chunks = two_requests(target, texts)
    wider = CachedTarget(target.twins, target.max_len, tokens=40, rows=2, program=target.program)
    wider.cache, wider.lengths = target.cache, target.lengths.copy()
    for (logits, _), (expected, _) in zip(wider.step(chunks), target.step(chunks)):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=REORDERED)


def test_case_30_padding_alone_writes_nothing(target, texts):
    """Rows and tokens of padding name a live slot, and leave it as it is."""
    target.prefill(0, texts[0][0][:30], [20, 10])
    batch = batch_from_chunks([(0, 30, np.zeros(0, np.int32))], token_count=TOKENS, rows=4)
    accepted = jnp.full(4, 8, jnp.int32)
    out = target.program(
        target.twins.params, batch, target.cache, target.page_table, accepted, cfg=target.twins.cfg
    )
    assert_same_bits(out.cache, target.cache)
    assert np.isfinite(out.logits).all()


def test_entries_without_a_page_are_dropped(target, texts):
    """A request whose pages are gone may close windows: no page of another request is touched."""
    target.prefill(1, texts[0][0][:31], [24, 7])
    lost = jnp.asarray(target.page_table).at[1].set(-1)
    batch, accepted = target.batch([Chunk(1, texts[0][0][31:40], 9)])
    out = target.program(
        target.twins.params, batch, target.cache, lost, accepted, cfg=target.twins.cfg
    )
    for name in ("csa_entries", "index_keys", "hca_entries"):
        assert_same_bits(getattr(out.cache, name), getattr(target.cache, name))
