"""Tiles of stored cache rows inside Triton kernels: plain, or fp8 decoded on the way.

A row is loaded in parts, since tile sides are powers of two. Parts of fp8 rows are their blocks of 64 channels:
larger ones spill registers. Codes become float16, two in one instruction and exactly, and their scale multiplies
there: no value loses more than 2**-25, and rows are normed, so that none comes near 65504. Beside float32 queries
everything is float32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.rows import ROW_BLOCK, Fp8Keys, Fp8Rows
from dspark_jax.kernels.triton import gather


class Part(NamedTuple):
    """Neighbouring channels of a row: `count` of them from `first`, in a tile `size` wide."""

    first: int
    count: int
    size: int

    @property
    def channels(self) -> jax.Array:
        """Channels of the row, int32 [size]; those from `first + count` on are not the part's."""
        return self.first + jnp.arange(self.size)

    def mask(self, rows: jax.Array) -> jax.Array:
        """Which of a tile's elements exist, given which of its rows do: bool [n] -> [n, size] or [n, 1]."""
        is_row = rows[:, None]
        if self.count == self.size:
            return is_row
        return is_row & (jnp.arange(self.size) < self.count)[None]

    def mask_of_valid(self) -> jax.Array | None:
        """`mask` for rows that all exist, None if every element does."""
        return None if self.count == self.size else self.mask(jnp.full(1, True))


def row_parts(stored: Any, part: int) -> tuple[Part, ...]:
    """How rows are cut: plain ones in pieces of `part`, fp8 ones in blocks, the rotary channels apart."""
    width = stored.shape[-1]
    if not isinstance(stored, Fp8Rows):
        return tuple(Part(first, part, part) for first in range(0, width, part))
    kept = stored.codes.shape[-1]
    bounds = [*range(0, kept, ROW_BLOCK), *range(kept, width, ROW_BLOCK), width]
    return tuple(whole_part(first, end - first) for first, end in pairwise(bounds))


def whole_part(first: int, count: int) -> Part:
    """These channels in one tile."""
    return Part(first, count, max(16, pl.next_power_of_2(count)))


def tile_dtype(stored: Any, queries: Any) -> Any:
    """Dtype in which rows or keys meet queries of dtype `queries`."""
    if not isinstance(stored, Fp8Rows | Fp8Keys):
        return stored.dtype
    return jnp.float32 if queries == jnp.float32 else jnp.float16


def load_parts(
    stored: Any,
    lead: tuple[jax.Array | int, ...],
    place: jax.Array,
    valid: jax.Array | None,
    parts: tuple[Part, ...],
    dtype: Any,
) -> list[jax.Array]:
    """Rows stored[*lead, place] by parts: [K, size] in `dtype`, zeros where not `valid` bool [K], None for all.

    `stored` is a ref [..., N, D] or `Fp8Rows` of refs; place int32 [K].
    """
    row = (*lead, place[:, None])
    masks = [part.mask_of_valid() if valid is None else part.mask(valid) for part in parts]
    if not isinstance(stored, Fp8Rows):
        return [
            gather(stored, *row, part.channels[None], mask=mask).astype(dtype)
            for part, mask in zip(parts, masks)
        ]
    kept = stored.codes.shape[-1]
    words = [
        gather(stored.scales, *lead, place, word, mask=valid)
        for word in range(stored.scales.shape[-1])
    ]
    loaded = []
    for part, mask in zip(parts, masks):
        if part.first < kept:
            codes = gather(stored.codes, *row, part.channels[None], mask=mask)
            scale = _scale(words, part.first // ROW_BLOCK).astype(dtype)
            loaded.append(codes.astype(dtype) * scale[:, None])
        else:
            channels = part.channels - kept
            rotary = gather(stored.rotary, *row, channels[None], mask=mask)
            loaded.append(rotary.astype(dtype))
    return loaded


def _scale(words: list[jax.Array], block: int) -> jax.Array:
    """Float32 scales [K] of a block, from packed ue8m0 bytes int32 [K]."""
    word, byte = divmod(block, 4)
    exponent = (words[word] >> (8 * byte)) & 0xFF
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
