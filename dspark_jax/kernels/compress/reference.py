"""Definition of `compress`: gather the rows of every closing window, one softmax per channel.

Also what a CPU serves with: few windows close in a step, so the places are taken a few at a time as far as they
are used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_PLACES = 8


def compress_reference(
    step_rows, open_rows, *, layer, closing, slots, positions, starts, row_heads, ratio, overlap
) -> jax.Array:
    """See `compress` for arguments and result."""
    tokens = step_rows.shape[0]
    ring = open_rows.shape[2]
    span = 2 * ratio if overlap else ratio
    offset = jnp.arange(span)
    own = (offset >= ratio)[:, None]
    count = closing.shape[0]
    size = min(count, _PLACES)

    def pool(i: jax.Array, out: jax.Array) -> jax.Array:
        # Both slices move back alike where the last places are fewer than `size`.
        place = jax.lax.dynamic_slice_in_dim(closing, i * size, size)
        token = jnp.minimum(place, tokens - 1)
        position = positions[token][:, None] - span + 1 + offset  # [size, span]
        ahead = position - starts[token][:, None]
        old = open_rows[layer, slots[token][:, None], position % ring]
        new = step_rows[jnp.clip(row_heads[token][:, None] + ahead, 0, tokens - 1)]
        rows = jnp.where((ahead < 0)[..., None], old, new)
        exists = (position >= 0) & (place < tokens)[:, None]
        rows = jnp.where(exists[..., None], rows, 0.0)
        values, gates = jnp.split(rows, 2, axis=-1)
        if overlap:
            values, gates = (
                jnp.where(own, second, first)
                for first, second in (jnp.split(x, 2, axis=-1) for x in (values, gates))
            )
        # A finite floor keeps places without any row finite.
        gates = jnp.where(exists[..., None], gates, -1e30)
        pooled = jnp.sum(jax.nn.softmax(gates, axis=1) * values, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(out, pooled, i * size, axis=0)

    width = step_rows.shape[1] // (4 if overlap else 2)
    start = jnp.zeros((count, width), step_rows.dtype)
    if count == size:
        return pool(jnp.int32(0), start)
    used = jnp.max(jnp.where(closing < tokens, jnp.arange(1, count + 1), 0))
    return jax.lax.fori_loop(0, (used + size - 1) // size, pool, start)
