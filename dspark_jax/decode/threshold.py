"""Where filters cut a row of logits, and its largest values, without sorting the row.

A sort of a large vocabulary is dear. A cut is found by halving the space of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_SIGN = np.uint32(1 << 31)


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest value, float32 [C], of each row of x float32 [C, V] without NaN; k int32 [C] in 1..V."""
    ranks = _to_ranks(x)
    return _from_ranks(
        _last_true(lambda rank: jnp.sum(ranks >= rank[:, None], axis=-1) >= k, x.shape[0])
    )


def nucleus(x: jax.Array, mass: jax.Array) -> jax.Array:
    """Which values of x float32 [C, V] belong to the smallest set of the most likely that holds `mass` [C].

    Under softmax(x): a value is kept while all larger ones together hold less than `mass`. Ties are kept together,
    and the largest value always is.
    """
    ranks = _to_ranks(x)
    peak = jnp.max(x, axis=-1, keepdims=True)
    weights = jnp.exp(x - peak)
    wanted = mass * jnp.sum(weights, axis=-1)

    def is_full_above(rank: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ranks > rank[:, None], weights, 0.0), axis=-1) >= wanted

    return (ranks > _last_true(is_full_above, x.shape[0])[:, None]) | (x == peak)


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Values float32 and places int32, both [C, count], of the largest entries of x float32 [C, V], largest first.

    Of ties the first comes first, as with `jax.lax.top_k`; x holds no NaN.
    """
    column = jnp.arange(x.shape[1])

    def find_next(last: tuple[jax.Array, jax.Array], _):
        value, place = (part[:, None] for part in last)
        behind = (x < value) | ((x == value) & (column > place))
        place = jnp.argmax(jnp.where(behind, x, -jnp.inf), axis=-1).astype(jnp.int32)
        found = jnp.take_along_axis(x, place[:, None], axis=-1)[:, 0], place
        return found, found

    rows = x.shape[0]
    before = jnp.full(rows, jnp.inf), jnp.full(rows, -1, jnp.int32)
    values, places = jax.lax.scan(find_next, before, length=count)[1]
    return values.T, places.T


def _last_true(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32 [rows] for which `holds`, true up to some rank and false from there on; 0 if for none."""

    def halve(i: jax.Array, rank: jax.Array) -> jax.Array:
        higher = rank | (_SIGN >> i.astype(jnp.uint32))
        return jnp.where(holds(higher), higher, rank)

    return jax.lax.fori_loop(0, 32, halve, jnp.zeros(rows, jnp.uint32))


def _to_ranks(x: jax.Array) -> jax.Array:
    """uint32 in the order of float32 x: sign bit turned over, and all bits where it was set; -0 ranks as 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_ranks(ranks: jax.Array) -> jax.Array:
    """The inverse of `_to_ranks`."""
    return jax.lax.bitcast_convert_type(
        jnp.where(ranks >= _SIGN, ranks ^ _SIGN, ~ranks), jnp.float32
    )
