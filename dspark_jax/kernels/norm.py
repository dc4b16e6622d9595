"""The norm of rows, which blocks and operations share."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array | None, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, times `gain` [..., D] if there is one.

    Statistics and gain are applied in float32; the result has the dtype of `x`.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if gain is not None:
        wide = wide * gain.astype(jnp.float32)
    return wide.astype(x.dtype)
