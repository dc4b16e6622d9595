"""Cache rows and indexer keys as they are stored: plain, rounded to what fp8 holds, or in fp8.

The released model rounds each row of its caches: channels before the rotary ones to e4m3 in blocks of 64 with a
power-of-two scale, the rotary ones to bfloat16. Both rounded formats below hold exactly these numbers, and
rounding them again changes nothing. Rounded plain rows are the faster to read; fp8 rows take 57 % of the memory.

What a format does differently stands in `encode` and `decode`. Elsewhere rows are a tree of arrays whose leading
axes are those of the rows. On a CPU XLA widens whole arrays of bfloat16 and fp8 around the loop that writes them:
they work there, but float32 is faster.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.kernels.quantized import exponent_to_scale, pack_exponents, unpack_exponents

ROW_BLOCK = 64
"""Channels that share a scale; the last block of a row may have fewer."""

_LEAST_AMAX = 1e-4
# Added to the bits of a float32 it carries into the exponent iff the mantissa exceeds 1.75, that of 448.
_ABOVE_LARGEST = (1 << 21) - 1
_LARGEST_EXPONENT = 8  # 448 = 1.75 * 2**8


class RowFormat(enum.Enum):
    """How a cache keeps its rows. `PLAIN` are the numbers as they come, in the cache's dtype."""

    PLAIN = "plain"
    ROUNDED = "rounded"
    FP8 = "fp8"


class RoundedRows(struct.PyTreeNode):
    """`values` [..., D], plain numbers that `Fp8Rows` would hold; the last `num_rotary` channels are rotary."""

    values: jax.Array
    num_rotary: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows."""
        return self.values.shape


class Fp8Rows(struct.PyTreeNode):
    """Rows [..., D] whose last R channels are rotary, in three arrays.

    Scales are words because a GPU's asynchronous loads take four bytes at least.
    """

    codes: jax.Array  # [..., D - R] float8_e4m3fn
    rotary: jax.Array  # [..., R] bfloat16
    scales: jax.Array  # [..., ceil(blocks / 4)] int32: four ue8m0 bytes, the first block's lowest

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows that are meant."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] + self.rotary.shape[-1])


class Fp8Keys(struct.PyTreeNode):
    """Indexer keys [..., I], each with one scale. They are in no format but this or plain."""

    codes: jax.Array  # [..., I] float8_e4m3fn
    scale: jax.Array  # [...] float32, a power of two, so that it may as well multiply a score

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys that are meant."""
        return self.codes.shape


Rows = jax.Array | RoundedRows | Fp8Rows
Keys = jax.Array | Fp8Keys


def empty_rows(
    lead: tuple[int, ...],
    width: int,
    row_format: RowFormat,
    *,
    num_rotary: int,
    dtype: Any,
    fill: float = 0.0,
) -> Any:
    """Rows [*lead, width] of `fill` in each channel: `Rows`, typed as what it takes the place of in a tree."""
    row = jnp.full(width, fill, dtype)
    if row_format is RowFormat.FP8:
        return _repeat(quantize_rows(row, num_rotary), lead)
    if row_format is RowFormat.ROUNDED:
        return _repeat(RoundedRows(row, num_rotary), lead)
    return _repeat(row, lead)


def empty_keys(
    lead: tuple[int, ...], width: int, row_format: RowFormat, *, dtype: Any, fill: float = 0.0
) -> Any:
    """Keys [*lead, width], as `empty_rows`. Keys are plain beside rounded rows."""
    key = jnp.full(width, fill, dtype)
    return _repeat(quantize_keys(key) if row_format is RowFormat.FP8 else key, lead)


def encode(rows: jax.Array, like: Rows | Keys) -> Any:
    """Plain rows [..., D] in the format of `like`, whose leading axes do not matter."""
    if isinstance(like, Fp8Rows):
        return quantize_rows(rows, like.rotary.shape[-1])
    if isinstance(like, Fp8Keys):
        return quantize_keys(rows)
    if isinstance(like, RoundedRows):
        rounded = decode(quantize_rows(rows, like.num_rotary))
        return like.replace(values=rounded.astype(like.values.dtype))
    return rows.astype(like.dtype)


def decode(stored: Rows | Keys) -> jax.Array:
    """Plain rows [..., D]: float32 from fp8, else in the dtype that they are kept in."""
    if isinstance(stored, Fp8Rows):
        return dequantize_rows(stored)
    if isinstance(stored, Fp8Keys):
        return stored.codes.astype(jnp.float32) * stored.scale[..., None]
    return plain_values(stored)


def plain_values(stored: Any) -> Any:
    """The array of rows that are kept as numbers, rounded or not; anything else as it is."""
    return stored.values if isinstance(stored, RoundedRows) else stored


def as_stored(rows: jax.Array, like: Rows) -> jax.Array:
    """What rows [..., D] are once they have been stored in `like` and read back, in their own dtype."""
    return decode(encode(rows, like)).astype(rows.dtype)


def gather(stored: Rows | Keys, index: tuple[Any, ...]) -> jax.Array:
    """Plain rows at an index into the leading axes."""
    return decode(jax.tree.map(lambda leaf: leaf[index], stored))


def scatter(stored: Any, index: tuple[Any, ...], rows: jax.Array) -> Any:
    """`Rows` or `Keys` with plain rows written at an index into the leading axes, places beyond the end dropped.

    In place if `stored` is donated or a loop's carry.
    """
    return jax.tree.map(
        lambda leaf, new: leaf.at[index].set(new, mode="drop"), stored, encode(rows, stored)
    )


def by_place(pool: Any) -> Any:
    """Pages [L, P, S, ...] of `Rows` as places [L, P * S, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]), pool)


def quantize_rows(rows: jax.Array, num_rotary: int) -> Fp8Rows:
    """Rows [..., D] of any float dtype in fp8; the last `num_rotary` channels are rotary."""
    kept, rotary = jnp.split(rows, [rows.shape[-1] - num_rotary], axis=-1)
    wide = kept.astype(jnp.float32)
    exponents = scale_exponents(jnp.max(jnp.abs(_blocks(wide)), axis=-1))
    return Fp8Rows(
        codes=_codes(wide, _per_channel(exponents, kept.shape[-1])),
        rotary=jax.lax.reduce_precision(rotary, exponent_bits=8, mantissa_bits=7).astype(
            jnp.bfloat16
        ),
        scales=pack_exponents(exponents),
    )


def dequantize_rows(rows: Fp8Rows) -> jax.Array:
    """Float32 [..., D]. bfloat16 holds each of these numbers exactly."""
    width = rows.codes.shape[-1]
    exponents = unpack_exponents(rows.scales)[..., : -(-width // ROW_BLOCK)]
    scales = exponent_to_scale(_per_channel(exponents, width))
    kept = rows.codes.astype(jnp.float32) * scales
    return jnp.concatenate([kept, rows.rotary.astype(jnp.float32)], axis=-1)


def quantize_keys(keys: jax.Array) -> Fp8Keys:
    """Keys [..., I] of any float dtype in fp8, a key one block."""
    wide = keys.astype(jnp.float32)
    exponents = scale_exponents(jnp.max(jnp.abs(wide), axis=-1))
    return Fp8Keys(_codes(wide, exponents[..., None]), exponent_to_scale(exponents))


def scale_exponents(amax: jax.Array) -> jax.Array:
    """ceil(log2(max(amax, 1e-4) / 448)) + 127 as uint8, exactly: float32 amax [...] -> ue8m0 bytes [...]."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(amax, _LEAST_AMAX), jnp.int32)
    return (((bits + _ABOVE_LARGEST) >> 23) - _LARGEST_EXPONENT).astype(jnp.uint8)


def _repeat(row: Any, lead: tuple[int, ...]) -> Any:
    """A tree of arrays with axes `lead` in front."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), row)


def _blocks(x: jax.Array) -> jax.Array:
    """[..., n] in blocks [..., ceil(n / 64), 64], zeros behind the last channel."""
    missing = -x.shape[-1] % ROW_BLOCK
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], -1, ROW_BLOCK)


def _per_channel(of_blocks: jax.Array, width: int) -> jax.Array:
    """Values of blocks [..., ceil(width / 64)] for each channel [..., width]."""
    return jnp.repeat(of_blocks, ROW_BLOCK, axis=-1)[..., :width]


def _codes(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """Float32 x in e4m3, divided by scales that keep it within 448: exponents broadcast to x."""
    return _round_to_e4m3(x * exponent_to_scale(254 - exponents)).astype(jnp.float8_e4m3fn)


def _round_to_e4m3(x: jax.Array) -> jax.Array:
    """Float32 x within 448, rounded to three bits behind the point, or to 2**-9 where e4m3 is subnormal.

    Rounded as float32, because XLA may drop a conversion that the opposite one follows.
    """
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(x) < 2.0**-6, jnp.round(x * 2.0**9) * 2.0**-9, normal)
