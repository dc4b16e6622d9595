"""Random streams: a draw depends on the request, the position and what it is for, on nothing else."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.inversion import NUMBERS, draw_draft
from dspark_jax.decode.sampling import Stream, draw, row_keys, uniform
from tests.decode.tables import sampling_rows
from tests.quick_jit import quick_jit

ROWS = 4000
VOCAB = 8
DRAFTS = 7
# Four standard deviations of the correlation of independent samples.
CORRELATION = 4 / ROWS**0.5

drawn = quick_jit(draw)
coins_of = quick_jit(uniform, static_argnames=("stream", "shape"))


@quick_jit
def drafted(logits, rows, places) -> jax.Array:
    return draw_draft(logits, rows, uniform(rows, places, Stream.DRAFT, (NUMBERS,)))


@quick_jit
def noise(rows, positions) -> jax.Array:
    """Gumbel noise [R] on the first token, as `draw` makes it."""
    keys = row_keys(rows.seed, positions, Stream.TARGET)
    return jax.vmap(lambda key: jax.random.gumbel(key, (VOCAB,)))(keys)[:, 0]


def test_draws_follow_their_row_into_any_order_and_company():
    rows = sampling_rows(ROWS, 1)
    positions = jnp.arange(ROWS) % 50
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, VOCAB)), jnp.float32)
    order = np.random.default_rng(3).permutation(ROWS)
    moved, places = jax.tree.map(lambda leaf: leaf[order], rows), positions[order]
    for make in (drawn, drafted):
        tokens = make(logits, rows, positions)
        np.testing.assert_array_equal(make(logits[order], moved, places), tokens[order])
    for stream in Stream:
        coins = coins_of(rows, positions, stream=stream)
        np.testing.assert_array_equal(coins_of(moved, places, stream=stream), coins[order])


def test_many_places_at_once_are_each_of_them_alone():
    rows = sampling_rows(5, 8)
    places = jnp.arange(15).reshape(5, 3)
    together = coins_of(rows, places, stream=Stream.DRAFT, shape=(2,))
    assert together.shape == (5, 3, 2)
    for k in range(3):
        alone = coins_of(rows, places[:, k], stream=Stream.DRAFT, shape=(2,))
        np.testing.assert_array_equal(together[:, k], alone)


def test_streams_positions_and_rounds_are_independent():
    rows, place = sampling_rows(ROWS, 4), jnp.full(ROWS, 30)

    def draft_number(anchor: int, position: int, which: int) -> jax.Array:
        in_round = jnp.full(ROWS, anchor * DRAFTS + position - anchor - 1)
        return coins_of(rows, in_round, stream=Stream.DRAFT, shape=(NUMBERS,))[:, which]

    samples = {
        "target": noise(rows, place),
        "draft": draft_number(29, 30, 0),
        "draft, second number": draft_number(29, 30, 1),
        "draft of an earlier round": draft_number(27, 30, 0),
        "next position": noise(rows, place + 1),
        "draft of the next position": draft_number(29, 31, 0),
        "coin": coins_of(rows, place, stream=Stream.ACCEPT),
        "next coin": coins_of(rows, place + 1, stream=Stream.ACCEPT),
    }
    for (one, x), (other, y) in itertools.combinations(samples.items(), 2):
        assert abs(np.corrcoef(x, y)[0, 1]) < CORRELATION, f"{one} and {other}"


def test_seeds_differ_in_all_64_bits():
    base = np.array([[5, 9]], np.uint32)
    seeds = [base.copy() for _ in range(65)]
    for bit in range(64):
        seeds[bit + 1][0, bit // 32] ^= np.uint32(1 << (bit % 32))
    keys = row_keys(jnp.asarray(np.concatenate(seeds)), jnp.full(65, 7), Stream.TARGET)
    data = np.asarray(jax.random.key_data(keys))
    assert len({tuple(row) for row in data.tolist()}) == 65


def test_draws_have_the_probabilities_of_the_softmax():
    logits = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32)
    probs = np.exp(logits) / np.exp(logits).sum()
    for make in (drawn, drafted):
        rows, same = sampling_rows(ROWS, 6), jnp.broadcast_to(logits, (ROWS, VOCAB))
        share = np.bincount(make(same, rows, jnp.full(ROWS, 3)), minlength=VOCAB) / ROWS
        np.testing.assert_allclose(share, probs, atol=4 * 0.5 / ROWS**0.5)
