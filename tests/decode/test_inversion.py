"""Draws by inversion: the token where the running sum of probabilities passes the numbers, never a masked one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax.decode.inversion import NUMBERS, draw_by_inversion
from dspark_jax.decode.sampling import NEVER
from tests.quick_jit import quick_jit

inverted = quick_jit(draw_by_inversion)
seeds = given(seed=st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("vocab", [1, 2, 3, 16, 100, 1024])
@seeds
def test_a_grid_of_numbers_finds_every_token_in_its_share(vocab: int, seed: int) -> None:
    """A grid of 64 x 64 numbers gives each token its probability, up to one line of the grid on either side."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    line = (np.arange(64) + 0.5) / 64
    numbers = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, NUMBERS)
    tokens = inverted(np.broadcast_to(logits, (len(numbers), vocab)), numbers.astype(np.float32))
    share = np.bincount(tokens, minlength=vocab) / len(numbers)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum()
    np.testing.assert_allclose(share, probs, atol=2 / 64)
    assert np.all(np.diff(np.asarray(tokens).reshape(64, 64), axis=1) >= 0)


def test_the_law_of_a_large_vocabulary() -> None:
    rng = np.random.default_rng(1)
    vocab, draws = 700, 200_000
    logits = rng.normal(0, 2, vocab).astype(np.float32)
    numbers = rng.random((draws, NUMBERS), dtype=np.float32)
    parts = [inverted(np.broadcast_to(logits, (20_000, vocab)), n) for n in np.split(numbers, 10)]
    seen = np.bincount(np.concatenate(parts), minlength=vocab)
    probs = np.exp(logits.astype(np.float64))
    expected = draws * probs / probs.sum()
    rare = expected < 10
    counts = np.append(seen[~rare], seen[rare].sum())
    assert chisquare(counts, np.append(expected[~rare], expected[rare].sum())).pvalue > 1e-4


@seeds
def test_extreme_numbers_never_find_what_is_masked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edge = [0.0, 1e-7, 0.5, 1 - 2**-23, np.nextafter(np.float32(1), np.float32(0))]
    numbers = np.array([(a, b) for a in edge for b in edge], np.float32)
    for vocab in (1, 5, 33, 1000):
        logits = rng.normal(0, 3, vocab).astype(np.float32)
        kept = rng.random(vocab) < 0.3
        kept[rng.integers(vocab)] = True
        shaped = jnp.broadcast_to(jnp.where(kept, logits, NEVER), (len(numbers), vocab))
        tokens = np.asarray(inverted(shaped, numbers))
        assert kept[tokens].all()
        assert tokens[0] == np.flatnonzero(kept)[0]


@seeds
def test_one_sure_token_is_always_drawn(seed: int) -> None:
    numbers = np.random.default_rng(seed).random((300, NUMBERS), dtype=np.float32)
    sure = np.arange(300) % 77
    shaped = np.where(np.arange(77) == sure[:, None], 0.0, NEVER).astype(np.float32)
    np.testing.assert_array_equal(inverted(shaped, numbers), sure)
