"""Weights as the released files store them: fp8 in 128 x 128 blocks, fp4 in runs of 32 along the input.

Both scales are ue8m0: a byte b stands for 2^(b - 127) and multiplies. Leading axes (layer, expert) are free,
so a stack of layers is one array.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

FP8_BLOCK = 128
FP4_RUN = 32


@struct.dataclass
class Fp8Weight:
    """`weight` [..., N, K] float8_e4m3fn; `scale` [..., ceil(N/128), ceil(K/128)] uint8 exponents."""

    weight: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant."""
        return self.weight.shape


@struct.dataclass
class Fp4Weight:
    """`packed` [..., N, K/2] uint8, low nibble first; `scale` [..., N, K/32] uint8 exponents."""

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])


Weight = jax.Array | Fp8Weight | Fp4Weight


def exponent_to_scale(exponent: jax.Array) -> jax.Array:
    """ue8m0 bytes [...] -> float32 powers of two [...]."""
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent.astype(jnp.int32) - 127)


def dequantize(weight: Weight, dtype: jnp.dtype | type = jnp.float32) -> jax.Array:
    """The matrix [..., N, K] that `weight` stands for, in `dtype`; a plain array is only cast."""
    if isinstance(weight, Fp8Weight):
        n, k = weight.weight.shape[-2:]
        scale = exponent_to_scale(weight.scale)
        scale = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, -2)[..., :n, :], FP8_BLOCK, -1)[..., :k]
        return (weight.weight.astype(jnp.float32) * scale).astype(dtype)
    if isinstance(weight, Fp4Weight):
        codes = jnp.stack([weight.packed & 0xF, weight.packed >> 4], axis=-1)
        values = decode_fp4(codes.reshape(weight.shape))
        return (values * jnp.repeat(exponent_to_scale(weight.scale), FP4_RUN, -1)).astype(dtype)
    return weight.astype(dtype)


def decode_fp4(codes: jax.Array) -> jax.Array:
    """E2M1 codes 0..15 [...] -> float32 values 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    magnitude = jnp.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], jnp.float32)
    return jnp.concatenate([magnitude, -magnitude])[codes]


def take(weight: Weight, index: tuple[jax.Array | int, ...]) -> Weight:
    """Index the leading axes of a stack: `take(w, (layer,))`, `take(experts, (layer, expert_ids))`."""
    return jax.tree.map(lambda leaf: leaf[index], weight)
