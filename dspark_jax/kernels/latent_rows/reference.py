"""Definition of `finish_rows` and `store_rows`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.kernels.rows import as_stored, scatter


def finish_rows_reference(raw, gain, like, cos, sin, *, layer, eps) -> jax.Array:
    """See `finish_rows` for arguments and result."""
    return as_stored(_rotated(raw, gain[layer], cos, sin, eps), like)


def store_rows_reference(pool, raw, gain, page, offset, cos, sin, *, layer, eps) -> Any:
    """See `store_rows` for arguments and result."""
    return scatter(pool, (layer, page, offset), _rotated(raw, gain[layer], cos, sin, eps))


def _rotated(
    raw: jax.Array, gain: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    """Rows [N, D] normed with gain [D] and rotated, in the dtype of `raw`."""
    wide = raw.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    normed = (wide * gain.astype(jnp.float32)).astype(raw.dtype)
    kept, tail = jnp.split(normed, [raw.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    even, odd = tail[:, 0::2].astype(jnp.float32), tail[:, 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([kept, turned.reshape(tail.shape).astype(raw.dtype)], axis=-1)
