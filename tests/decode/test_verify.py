"""Verification case by case, and how often drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.inversion import NUMBERS, draw_draft
from dspark_jax.decode.sampling import NEVER, Stream, draw, uniform
from dspark_jax.decode.verify import LogitRows, Verdict, verify_coupled, verify_standard
from tests.decode.tables import sampling_rows
from tests.quick_jit import quick_jit

VOCAB = 6
DRAFTS = 3
REQUESTS = 4000
PLACE = 40  # of every anchor
# Four standard deviations of a share of the requests, at the most.
SHARE = 4 * 0.5 / REQUESTS**0.5


@quick_jit
def judge(target, tokens, q, lens, rows) -> Verdict:
    own = jnp.take_along_axis(jax.nn.log_softmax(q), tokens[..., None], axis=2)[..., 0]
    index = jnp.arange(REQUESTS)
    where = LogitRows(index * (DRAFTS + 1), lens, jnp.full(REQUESTS, PLACE))
    flat = target.reshape(-1, VOCAB)
    return verify_standard(flat, tokens, own, lambda k: q[index, k], where, rows)


def standard(target, tokens, q, lens, **sampling) -> Verdict:
    """Judge every request's first `lens` of `tokens` [R, G] from `q` by `target` [R, G + 1, V], both logits.

    Arguments are broadcast to those shapes.
    """
    return judge(
        np.broadcast_to(np.asarray(target, np.float32), (REQUESTS, DRAFTS + 1, VOCAB)),
        np.broadcast_to(np.asarray(tokens, np.int32), (REQUESTS, DRAFTS)),
        np.broadcast_to(np.asarray(q, np.float32), (REQUESTS, DRAFTS, VOCAB)),
        np.broadcast_to(np.asarray(lens, np.int32), REQUESTS),
        sampling_rows(REQUESTS, 1, **sampling),
    )


targets = quick_jit(draw)


@quick_jit
def drafts(logits, rows, anchors) -> jax.Array:
    return draw_draft(logits, rows, uniform(rows, anchors, Stream.DRAFT, (NUMBERS,)))


def draws(logits, draw: Callable[..., jax.Array]) -> np.ndarray:
    """Each request's token behind its anchor, from `logits` [V] or [R, V]."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (REQUESTS, VOCAB))
    rows, anchors = sampling_rows(REQUESTS, 1), jnp.full(REQUESTS, PLACE)
    return np.asarray(draw(logits, rows, anchors + 1))


def kept(verdict: Verdict) -> list[list[int]]:
    return [
        row[: n + 1].tolist() for row, n in zip(np.asarray(verdict.tokens), verdict.accept_lens)
    ]


def probs(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def test_greedy_keeps_drafts_while_they_are_the_best():
    target = np.eye(VOCAB)[[3, 1, 4, 2]]
    tokens = np.zeros((REQUESTS, DRAFTS))
    tokens[:5] = [[3, 1, 4], [3, 1, 0], [3, 0, 4], [0, 1, 4], [3, 1, 4]]
    lens = np.full(REQUESTS, 3)
    lens[4] = 1
    verdict = standard(target, tokens, 0, lens, temperature=0.0)
    assert kept(verdict)[:5] == [[3, 1, 4, 2], [3, 1, 4], [3, 1], [3], [3, 1]]


def test_equal_laws_accept_everything_verified():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(REQUESTS, DRAFTS + 1, VOCAB))
    tokens = rng.integers(0, VOCAB, (REQUESTS, DRAFTS))
    lens = rng.integers(0, DRAFTS + 1, REQUESTS)
    verdict = standard(logits, tokens, logits[:, :DRAFTS], lens)
    # q equals p up to the rounding of a normalisation.
    assert np.mean(np.asarray(verdict.accept_lens) == lens) > 0.99


def test_what_the_target_never_draws_is_never_accepted():
    """Not even by a coin of zero, nor when the drafter was sure."""
    only = np.where(np.arange(VOCAB) == 2, 0, NEVER)
    sure = np.where(np.arange(VOCAB) == 5, 0, NEVER)
    assert kept(standard(only, 5, sure, DRAFTS)) == [[2]] * REQUESTS


def test_a_drafter_of_nan_yields_the_targets_own_draw():
    target = np.random.default_rng(3).normal(size=(REQUESTS, 1, VOCAB))
    verdict = standard(target, 0, np.nan, 2)
    assert kept(verdict) == draws(target[:, 0], targets)[:, None].tolist()


def test_without_drafts_the_target_draws_itself():
    target = np.random.default_rng(4).normal(size=(REQUESTS, 1, VOCAB))
    verdict = standard(target, 0, 0, 0)
    assert kept(verdict) == draws(target[:, 0], targets)[:, None].tolist()


def test_drafts_are_accepted_as_often_as_the_laws_overlap():
    """The label that the confidence head learns: sum_v min(p(v), q(v))."""
    p, q = np.random.default_rng(5).normal(0, 1, (2, VOCAB))
    tokens = draws(q, drafts)
    verdict = standard(p, tokens[:, None], q, 1)
    overlap = np.minimum(probs(p), probs(q)).sum()
    assert 0.5 < overlap < 0.9
    assert np.mean(verdict.accept_lens) == pytest.approx(overlap, abs=SHARE)


def test_coupled_acceptance_has_its_lower_bound():
    """One noise for both sides agrees with probability at least (1 - TV) / (1 + TV)."""
    p, q = np.random.default_rng(7).normal(0, 1, (2, VOCAB))
    tokens, own = draws(q, targets), draws(p, targets)
    index = jnp.arange(REQUESTS)
    where = LogitRows(index * 2, jnp.ones(REQUESTS, int), jnp.full(REQUESTS, PLACE))
    flat = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (2 * REQUESTS, VOCAB))
    owner = jnp.arange(2 * REQUESTS) // 2
    rows = sampling_rows(REQUESTS, 1)
    verdict = quick_jit(verify_coupled)(flat, jnp.asarray(tokens)[:, None], where, rows, owner)
    np.testing.assert_array_equal(verdict.tokens[:, 0], own)
    np.testing.assert_array_equal(verdict.accept_lens, tokens == own)
    gap = np.abs(probs(p) - probs(q)).sum() / 2
    assert (1 - gap) / (1 + gap) - SHARE < np.mean(verdict.accept_lens) < 1 - gap + SHARE


def test_rows_that_no_request_owns_do_not_matter():
    """Behind the last verified row of every request: NaN, as padding may be."""
    rng = np.random.default_rng(9)
    target = rng.normal(size=(REQUESTS, DRAFTS + 1, VOCAB))
    tokens = rng.integers(0, VOCAB, (REQUESTS, DRAFTS))
    expected = kept(standard(target, tokens, 0, 1))
    target[:, 2:] = np.nan
    assert kept(standard(target, tokens, 0, 1)) == expected
