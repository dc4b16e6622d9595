"""Weights with the released files' values: fp8 in 128 x 128 blocks, fp4 in runs of 32 along the input.

Both scales are ue8m0: a byte b stands for 2^(b - 127) and multiplies. Leading axes (layer, expert) are free,
so a stack of layers is one array. Codes lie in memory as in the files, those of fp4 seen as words of two bytes;
fp4 scales are regrouped, four to a word and rows innermost, so that a kernel reads those of a tile in one
coalesced load. A CPU keeps neither: it holds matrices by column, two bytes a value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

FP8_BLOCK = 128
FP4_CODES = 4
"""Values in a word of two bytes."""
FP4_RUN = 32
FP4_WORD = 4 * FP4_RUN
"""Input columns whose scales share one word."""


class Fp8Weight(struct.PyTreeNode):
    """`weight` [..., N, K] float8_e4m3fn; `scale` [..., ceil(N/128), ceil(K/128)] uint8 exponents."""

    weight: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant."""
        return self.weight.shape


class Fp4Weight(struct.PyTreeNode):
    """`packed` [..., N, K/4] int16 and `scale` [..., ceil(K/128), N] int32 (`pack_fp4_scale`).

    A word of `packed` holds four codes, the first in the lowest bits. They are words and not bytes because a
    kernel then gets both operands of a product into registers as the matrix units want them.
    """

    packed: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant."""
        return (*self.packed.shape[:-1], FP4_CODES * self.packed.shape[-1])


Weight = jax.Array | Fp8Weight | Fp4Weight


class ColumnWeight(struct.PyTreeNode):
    """`bits` [..., K, N], the transposed matrix: what a CPU multiplies by.

    They are uint16, the patterns of bfloat16, or float32. A product on a CPU wants float32 inputs first, and XLA
    copies a layer out of its stack in any case. Widening by a shift on the way reads half the bytes, and the
    product needs no transposition of its own. The type is not bfloat16 because XLA would widen the whole stack
    ahead of the loop over layers.
    """

    bits: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant."""
        return (*self.bits.shape[:-2], self.bits.shape[-1], self.bits.shape[-2])


def exponent_to_scale(exponent: jax.Array) -> jax.Array:
    """ue8m0 bytes [...] -> float32 powers of two [...]."""
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent.astype(jnp.int32) - 127)


def dequantize(weight: Weight | ColumnWeight, dtype: jnp.dtype | type = jnp.float32) -> jax.Array:
    """The matrix [..., N, K] that `weight` stands for, in `dtype`; a plain array is only cast."""
    if isinstance(weight, Fp8Weight):
        n, k = weight.weight.shape[-2:]
        scale = exponent_to_scale(weight.scale)
        scale = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, -2)[..., :n, :], FP8_BLOCK, -1)[..., :k]
        return (weight.weight.astype(jnp.float32) * scale).astype(dtype)
    if isinstance(weight, Fp4Weight):
        codes = (weight.packed[..., None] >> jnp.arange(0, 16, 4, dtype=jnp.int16)) & 0xF
        values = decode_fp4(codes.reshape(weight.shape))
        scale = exponent_to_scale(unpack_fp4_scale(weight.scale, weight.shape[-1]))
        return (values * jnp.repeat(scale, FP4_RUN, -1)).astype(dtype)
    if isinstance(weight, ColumnWeight):
        wide = weight.bits
        if wide.dtype == jnp.uint16:
            wide = jax.lax.bitcast_convert_type(wide.astype(jnp.uint32) << 16, jnp.float32)
        return jnp.swapaxes(wide, -1, -2).astype(dtype)
    return weight.astype(dtype)


def by_column(matrix: Weight, *, is_wide: bool = False) -> Any:
    """A float32 matrix [..., N, K] as `ColumnWeight` if bfloat16 holds every value; anything else as it is.

    With `is_wide` its values stay float32: faster where a matrix stands alone and meets few rows. It is typed as
    the array whose place it takes in a tree; `dequantize` and `take` know it, kernels do not. Released values all
    fit: fp8 and fp4 have at most four significant bits, and their scales are powers of two.
    """
    if not isinstance(matrix, jax.Array) or matrix.dtype != jnp.float32:
        return matrix
    # On the host: XLA would compile each of these operations for every shape of a model.
    patterns = np.asarray(matrix).view(np.uint32)
    if is_wide:
        return ColumnWeight(jnp.asarray(np.swapaxes(patterns, -1, -2).copy().view(np.float32)))
    if np.any(patterns & 0xFFFF):
        return matrix
    return ColumnWeight(jnp.asarray(np.swapaxes(patterns >> 16, -1, -2).astype(np.uint16)))


def fp4_packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of `Fp4Weight.packed` for a matrix [..., N, K]."""
    return (*shape[:-1], shape[-1] // FP4_CODES)


def fp4_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of `Fp4Weight.scale` for a matrix [..., N, K]."""
    *lead, rows, columns = shape
    return (*lead, -(-columns // FP4_WORD), rows)


def pack_fp4_scale(exponents: Any) -> Any:
    """Exponents uint8 [..., N, K/32] -> words int32 [..., ceil(K/128), N], the first run in the low byte.

    Takes and gives NumPy or JAX arrays; missing runs of the last word are zero.
    """
    xp = jnp if isinstance(exponents, jax.Array) else np
    return xp.swapaxes(pack_exponents(exponents), -1, -2)


def unpack_fp4_scale(words: Any, columns: int) -> Any:
    """The inverse of `pack_fp4_scale` for a matrix of `columns` input columns K."""
    xp = jnp if isinstance(words, jax.Array) else np
    return unpack_exponents(xp.swapaxes(words, -1, -2))[..., : columns // FP4_RUN]


def pack_exponents(exponents: Any) -> Any:
    """Exponents uint8 [..., n] -> words int32 [..., ceil(n/4)], the first in the low byte, zeros behind the last.

    Takes and gives NumPy or JAX arrays.
    """
    xp = jnp if isinstance(exponents, jax.Array) else np
    missing = -exponents.shape[-1] % 4
    wide = xp.pad(exponents.astype(xp.int32), [(0, 0)] * (exponents.ndim - 1) + [(0, missing)])
    wide = wide.reshape(*wide.shape[:-1], -1, 4)
    return wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16 | wide[..., 3] << 24


def unpack_exponents(words: Any) -> Any:
    """The inverse of `pack_exponents`: int32 [..., m] -> uint8 [..., 4m], NumPy or JAX."""
    xp = jnp if isinstance(words, jax.Array) else np
    exponents = (words[..., None] >> xp.arange(0, 32, 8, dtype=xp.int32)) & 0xFF
    return exponents.reshape(*words.shape[:-1], -1).astype(xp.uint8)


def decode_fp4(codes: jax.Array) -> jax.Array:
    """E2M1 codes 0..15 [...] -> float32 values 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    magnitude = jnp.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], jnp.float32)
    return jnp.concatenate([magnitude, -magnitude])[codes]


def take(weight: Weight | ColumnWeight, index: tuple[jax.Array | int, ...]) -> Weight:
    """Index the leading axes of a stack: `take(w, (layer,))`, `take(experts, (layer, expert_ids))`."""
    return jax.tree.map(lambda leaf: leaf[index], weight)
