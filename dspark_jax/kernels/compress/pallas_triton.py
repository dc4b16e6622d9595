"""Triton kernel of `compress`: one program pools a block of channels of one closing window.

Norm, rotation, rounding and the place in a page are the work of `latent_rows`, which sees a row as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.triton import MASKED, gather, scatter, triton_call

TILE_VALUES = 4096
"""Rows times channels of a tile: two such float32 tiles stay in registers of four warps."""


def compress_pallas(
    step_rows,
    open_rows,
    *,
    layer,
    closing,
    slots,
    positions,
    starts,
    row_heads,
    ratio,
    overlap,
    dispatch: Dispatch,
) -> jax.Array:
    """See `compress` for arguments and result; unused places hold zeros."""
    width = step_rows.shape[1] // (4 if overlap else 2)
    span = 2 * ratio if overlap else ratio
    channels = min(pl.next_power_of_2(width), max(16, TILE_VALUES // pl.next_power_of_2(span)))
    return triton_call(
        partial(_pool, ratio=ratio, span=span, channels=channels),
        closing,
        slots,
        positions,
        starts,
        row_heads,
        jnp.asarray(layer, jnp.int32).reshape(1),
        step_rows,
        open_rows,
        grid=(pl.cdiv(width, channels), closing.shape[0]),
        out_shape=jax.ShapeDtypeStruct((closing.shape[0], width), jnp.float32),
        name="compress",
        dispatch=dispatch,
        num_warps=4,
    )


def _pool(
    closing: Any,
    slots: Any,
    positions: Any,
    starts: Any,
    row_heads: Any,
    layer: Any,
    step_rows: Any,
    open_rows: Any,
    out: Any,
    *,
    ratio: int,
    span: int,
    channels: int,
) -> None:
    """Body: `channels` channels of one window.

    closing [C]; slots, positions, starts, row_heads [T]; layer [1]; step_rows [T, 2*k*D];
    open_rows [L, slots, ring, 2*k*D]; out [C, D].
    """
    block, window = pl.program_id(0), pl.program_id(1)
    tokens, length = step_rows.shape
    ring, width = open_rows.shape[2], out.shape[1]
    used = closing[window] < tokens
    token = jnp.minimum(closing[window], tokens - 1)
    offset = jnp.arange(pl.next_power_of_2(span))
    position = positions[token] - span + 1 + offset
    exists = used & (position >= 0) & (offset < span)
    ahead = position - starts[token]
    channel = block * channels + jnp.arange(channels)
    # Of an overlapping window the first `ratio` rows give their first D channels, the others their second.
    second = width if span > ratio else 0
    column = channel[None] + jnp.where(offset >= ratio, second, 0)[:, None]
    place = jnp.where(position >= 0, lax.rem(position, ring), 0)[:, None]
    inside = (channel < width)[None]
    old = (exists & (ahead < 0))[:, None] & inside
    new = (exists & (ahead >= 0))[:, None] & inside

    def read(column):
        kept = gather(open_rows, layer[0], slots[token], place, column, mask=old)
        own = gather(step_rows, (row_heads[token] + ahead)[:, None], column, mask=new)
        return jnp.where(old, kept, own)

    values, gates = read(column), read(column + length // 2)
    gates = jnp.where(exists[:, None], gates, MASKED)
    weights = jnp.exp(gates - jnp.max(gates, axis=0, keepdims=True))
    pooled = jnp.sum(weights * values, axis=0) / jnp.sum(weights, axis=0)
    scatter(out, window, channel, value=pooled, mask=channel < width)
