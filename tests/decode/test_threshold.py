"""Cuts and largest values against sorted rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.decode.sampling import NEVER
from dspark_jax.decode.threshold import kth_largest, largest, nucleus

_kth_largest, _nucleus = jax.jit(kth_largest), jax.jit(nucleus)
_largest = jax.jit(largest, static_argnums=1)


def rows(seed: int) -> np.ndarray:
    """Logits [4, 50]: plain, on a coarse grid with ties and both zeros, mostly masked, and over all magnitudes."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(size=50)
    grid = rng.integers(-3, 3, 50) * rng.choice([-0.5, 0.5], 50)
    masked = np.where(rng.random(50) < 0.9, NEVER, rng.normal(size=50))
    wide = rng.choice([-1, 1], 50) * 10.0 ** rng.uniform(-37, 30, 50)
    return np.stack([plain, grid, masked, wide]).astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_the_kth_largest_value_is_exact(seed, k):
    x = rows(seed)
    expected = np.take_along_axis(-np.sort(-x, axis=1), np.array(k)[:, None] - 1, axis=1)[:, 0]
    np.testing.assert_array_equal(_kth_largest(x, jnp.array(k)), expected)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(0.01, 0.999), min_size=4, max_size=4),
)
def test_a_nucleus_is_the_smallest_set_that_holds_its_mass(seed, mass):
    x = rows(seed)
    kept = np.asarray(_nucleus(x, jnp.array(mass, jnp.float32)))
    for row, own, wanted in zip(x.astype(np.float64), kept, mass):
        probs = np.exp(row - row.max())
        probs /= probs.sum()
        edge = row[own].min()
        np.testing.assert_array_equal(own, row >= edge)
        assert probs[own].sum() >= wanted - 1e-6
        assert probs[row > edge].sum() < wanted + 1e-6


@pytest.mark.parametrize("mass", [1e-30, 0.5, 1.0])
def test_ties_stay_together_and_the_largest_always_stays(mass):
    x = jnp.array([[1.0, 3.0, 3.0, NEVER]])
    kept = _nucleus(x, jnp.array([mass], jnp.float32))[0].tolist()
    assert kept[1:3] == [True, True]
    assert kept[0] == (mass == 1.0)


@given(st.integers(0, 2**32 - 1))
def test_the_largest_come_as_from_top_k(seed):
    x = rows(seed)
    values, places = _largest(x, 20)
    expected_values, expected_places = jax.lax.top_k(x + 0.0, 20)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(places, expected_places)


def test_minus_zero_is_zero():
    x = jnp.array([[0.0, -0.0, -1.0]])
    assert _kth_largest(x, jnp.array([2]))[0] == 0.0
    assert _nucleus(x, jnp.array([0.3], jnp.float32))[0].tolist() == [True, True, False]
