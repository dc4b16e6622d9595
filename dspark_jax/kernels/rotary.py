"""Rotary embedding of a row's last channels, by angles that are given."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def turn_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the last R channels of x [..., D] in interleaved pairs; with `-sin`, back.

    cos and sin, float32 [..., R/2], broadcast over the axes of x before its last. Products are float32, the
    result has the dtype of x.
    """
    kept, tail = jnp.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    even, odd = tail[..., 0::2].astype(jnp.float32), tail[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([kept, turned.reshape(tail.shape).astype(x.dtype)], axis=-1)
