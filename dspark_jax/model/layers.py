"""Rotary embedding, linear maps and the clamped gate: pieces that every block is made of."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.linear import LayerWeight, stacked_linear
from dspark_jax.kernels.quantized import Weight, dequantize
from dspark_jax.kernels.rotary import turn_pairs


def rotary_frequencies(cfg: ModelConfig, *, compressed: bool) -> np.ndarray:
    """Angular frequency of each rotary pair [R/2], float32 radians per position.

    Sliding-only layers use `rope_theta` unscaled; layers with a compressor use `compress_rope_theta` with YaRN
    for everything in the layer. Cosine and sine are never scaled.
    """
    dim = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    pair = np.arange(dim // 2)
    freqs = theta ** (-2.0 * pair / dim)
    yarn = cfg.yarn
    if not compressed or yarn is None:
        return freqs.astype(np.float32)

    def pair_turning(rotations: float) -> float:
        """Pair index that makes `rotations` full turns over the original context."""
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    ramp = np.clip((pair - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return (freqs * (1 - ramp) + freqs / yarn.factor * ramp).astype(np.float32)


def rotary_angles(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [..., R/2], of positions [...] times frequencies."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: jax.Array, positions: jax.Array, frequencies: np.ndarray, *, inverse: bool = False
) -> jax.Array:
    """Rotate the last R entries of x [..., D] in interleaved pairs by position times frequency.

    `positions` [...] broadcasts over x without its last axis, from the left. Angles and products are float32.
    """
    cos, sin = (
        a.reshape(a.shape[:-1] + (1,) * (x.ndim - a.ndim) + a.shape[-1:])
        for a in rotary_angles(positions, frequencies)
    )
    return turn_pairs(x, cos, -sin if inverse else sin)


def linear(x: jax.Array, weight: Weight | LayerWeight) -> jax.Array:
    """x [..., K] times the transpose of weight [N, K] -> [..., N] in the dtype of x, accumulated in float32."""
    if isinstance(weight, LayerWeight):
        return linear_by_group(x[..., None, :], weight)[..., 0, :]
    matrix = dequantize(weight, x.dtype)
    return jnp.einsum("...k,nk->...n", x, matrix, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def linear_by_group(x: jax.Array, weight: Weight | LayerWeight) -> jax.Array:
    """x [..., G, K] -> [..., G, N]: group g meets the rows [g*N, (g+1)*N) of weight [G*N, K], else as `linear`."""
    if isinstance(weight, LayerWeight):
        return _layer_product(x, weight, x.dtype)
    matrix = dequantize(weight, x.dtype)
    each = zip(jnp.moveaxis(x, -2, 0), jnp.split(matrix, x.shape[-2]))
    return jnp.stack([linear(part, own) for part, own in each], axis=-2)


def _layer_product(x: jax.Array, weight: LayerWeight, dtype: Any) -> jax.Array:
    """`linear_by_group` with a result in `dtype`."""
    out = stacked_linear(
        x.reshape(-1, *x.shape[-2:]),
        weight.stack,
        layer=weight.layer,
        dtype=dtype,
        dispatch=weight.dispatch,
    )
    return out.reshape(*x.shape[:-1], -1)


def linear_f32(x: jax.Array, weight: Weight | LayerWeight) -> jax.Array:
    """`linear` with a float32 result, for what the model keeps wide (router, compressor, mixes, output head).

    Products of two bfloat16 numbers are exact in float32, so such operands are not widened first.
    """
    if isinstance(weight, LayerWeight):
        return _layer_product(x[..., None, :], weight, jnp.float32)[..., 0, :]
    if isinstance(weight, jax.Array) and x.dtype == weight.dtype == jnp.bfloat16:
        return jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=jnp.float32)
    wide = x.astype(jnp.float32)
    return jnp.einsum(
        "...k,nk->...n", wide, dequantize(weight, jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit); the gate is bounded from above only."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
