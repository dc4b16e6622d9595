"""Definition of `compress`: gather the rows of every closing window, one softmax per channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def compress_reference(
    step_rows, open_rows, *, layer, closing, slots, positions, starts, row_heads, ratio, overlap
) -> jax.Array:
    """See `compress` for arguments and result."""
    tokens = step_rows.shape[0]
    ring = open_rows.shape[2]
    span = 2 * ratio if overlap else ratio
    token = jnp.minimum(closing, tokens - 1)
    offset = jnp.arange(span)
    position = positions[token][:, None] - span + 1 + offset  # [C, span]
    ahead = position - starts[token][:, None]
    old = open_rows[layer, slots[token][:, None], position % ring]
    new = step_rows[jnp.clip(row_heads[token][:, None] + ahead, 0, tokens - 1)]
    rows = jnp.where((ahead < 0)[..., None], old, new)
    exists = (position >= 0) & (closing < tokens)[:, None]
    rows = jnp.where(exists[..., None], rows, 0.0)
    values, gates = jnp.split(rows, 2, axis=-1)
    if overlap:
        own = (offset >= ratio)[:, None]
        values, gates = (
            jnp.where(own, second, first)
            for first, second in (jnp.split(x, 2, axis=-1) for x in (values, gates))
        )
    # A finite floor keeps places without any row finite.
    gates = jnp.where(exists[..., None], gates, -1e30)
    return jnp.sum(jax.nn.softmax(gates, axis=1) * values, axis=1)
