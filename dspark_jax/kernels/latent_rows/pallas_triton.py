"""Triton kernel of `finish_rows` and `store_rows`: one launch, one program per row.

A row is held in three parts: the channels before the rotary ones, as blocks that share a scale, and the even and
the odd rotary ones. So rotation is elementwise and the largest value of a block is a reduction along one axis: no
value changes its place in the registers. One warp keeps every reduction within a warp.

Rounding is that of `rows.encode` bit for bit, in integers: the lowering has no `reduce_precision`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.rows import (
    ROW_BLOCK,
    Fp8Keys,
    Fp8Rows,
    RoundedRows,
    plain_values,
    scale_exponents,
)
from dspark_jax.kernels.triton import gather, scatter, triton_call

# Bits of a float32's mantissa that these two lack.
_BFLOAT16_LACKS, _E4M3_LACKS = 16, 20
_LEAST_NORMAL, _LARGEST, _SUBNORMAL_STEP = 2.0**-6, 448.0, 2.0**-9  # of e4m3


class _Parts(NamedTuple):
    """Something of each channel of a row, in powers of two."""

    kept: jax.Array  # [blocks, 64]
    even: jax.Array  # [pairs]
    odd: jax.Array  # [pairs]


class _Row(NamedTuple):
    """A row, whether it exists, its channels, and which of these do."""

    number: jax.Array  # int32
    exists: jax.Array  # bool
    channels: _Parts  # int32
    inside: _Parts  # bool


def finish_rows_pallas(
    raw, gain, like, cos, sin, *, layer, eps, dispatch: Dispatch, num_warps: int = 1
) -> jax.Array:
    """See `finish_rows`; `num_warps` of a program."""
    is_rounded = isinstance(like, Fp8Rows | RoundedRows)
    out: Any = jax.ShapeDtypeStruct(raw.shape, raw.dtype if is_rounded else like.dtype)
    if is_rounded:
        out = RoundedRows(out, 2 * cos.shape[1])
    finished = triton_call(
        partial(_finish, eps=eps),
        jnp.asarray(layer, jnp.int32).reshape(1),
        raw,
        gain,
        cos,
        sin,
        grid=raw.shape[:1],
        out_shape=out,
        name="finish_rows",
        dispatch=dispatch,
        num_warps=num_warps,
    )
    return plain_values(finished).astype(raw.dtype)


def store_rows_pallas(
    pool,
    raw,
    gain,
    page,
    offset,
    cos,
    sin,
    *,
    layer,
    eps,
    dispatch: Dispatch,
    num_warps: int = 1,
) -> Any:
    """See `store_rows`; `num_warps` of a program."""
    return triton_call(
        partial(_store, eps=eps),
        jnp.asarray(layer, jnp.int32).reshape(1),
        page,
        offset,
        raw,
        gain,
        cos,
        sin,
        grid=raw.shape[:1],
        in_place=pool,
        name="store_rows",
        dispatch=dispatch,
        num_warps=num_warps,
    )


def _finish(layer: Any, raw: Any, gain: Any, cos: Any, sin: Any, out: Any, *, eps: float) -> None:
    """Body: one row.

    layer [1]; raw [N, D]; gain [L, D]; cos, sin [N, R/2]; out [N, D], perhaps as `RoundedRows`.
    """
    number = pl.program_id(0)
    row = _row(number, number < raw.shape[0], raw.shape[1], cos.shape[1])
    _write(out, (number,), _rotated(raw, gain, cos, sin, layer[0], row, eps), row)


def _store(
    layer: Any,
    page: Any,
    offset: Any,
    raw: Any,
    gain: Any,
    cos: Any,
    sin: Any,
    pool: Any,
    *,
    eps: float,
) -> None:
    """Body: one row, if it has a page.

    layer [1]; page, offset [N]; raw [N, D]; gain [L, D]; cos, sin [N, R/2]; pool [L, P, S, D] of `Rows` or `Keys`.
    """
    number = pl.program_id(0)
    row = _row(number, page[number] < pool.shape[1], raw.shape[1], cos.shape[1])
    values = _rotated(raw, gain, cos, sin, layer[0], row, eps)
    _write(pool, (layer[0], page[number], offset[number]), values, row)


def _row(number: jax.Array, exists: jax.Array, width: int, pairs: int) -> _Row:
    """The parts of a row of `width` channels, twice `pairs` of which are rotary."""
    kept = width - 2 * pairs
    blocks = pl.next_power_of_2(max(1, pl.cdiv(kept, ROW_BLOCK)))
    block = jnp.arange(blocks)[:, None] * ROW_BLOCK + jnp.arange(ROW_BLOCK)[None]
    even = kept + 2 * jnp.arange(pl.next_power_of_2(pairs))
    is_pair = exists & (even < width)
    channels = _Parts(block, even, even + 1)
    return _Row(number, exists, channels, _Parts(exists & (block < kept), is_pair, is_pair))


def _rotated(
    raw: Any, gain: Any, cos: Any, sin: Any, layer: jax.Array, row: _Row, eps: float
) -> _Parts:
    """The row normed and rotated: float32 of values that the dtype of `raw` holds."""

    def load(ref: Any, index: jax.Array) -> _Parts:
        read = lambda channel, mask: gather(ref, index, channel, mask=mask).astype(jnp.float32)
        return jax.tree.map(read, row.channels, row.inside)

    cast = lambda x: x.astype(raw.dtype).astype(jnp.float32)
    wide, gains = load(raw, row.number), load(gain, layer)
    total = _reduced(jnp.sum, jnp.add, jax.tree.map(jnp.square, wide))
    scale = lax.rsqrt(total / raw.shape[1] + eps)
    kept, even, odd = jax.tree.map(lambda x, g: cast(x * scale * g), wide, gains)
    pair = jnp.arange(even.shape[0])
    c, s = (gather(ref, row.number, pair, mask=row.inside.even) for ref in (cos, sin))
    return _Parts(kept, cast(even * c - odd * s), cast(odd * c + even * s))


def _write(out: Any, place: tuple[jax.Array, ...], values: _Parts, row: _Row) -> None:
    """Store a row at `place`, an index into the leading axes, in the format of `out`."""
    if isinstance(out, Fp8Keys):
        amax = _reduced(jnp.max, jnp.maximum, jax.tree.map(jnp.abs, values))
        scale, inverse = _scales(scale_exponents(amax))
        codes = jax.tree.map(lambda x: _round_to_e4m3(x * inverse), values)
        _write_parts(out.codes, place, codes, row)
        scatter(out.scale, *place, value=scale, mask=row.exists)
    elif isinstance(out, Fp8Rows | RoundedRows):
        exponents = scale_exponents(jnp.max(jnp.abs(values.kept), axis=1))
        scale, inverse = _scales(exponents)
        codes = _round_to_e4m3(values.kept * inverse[:, None])
        even, odd = (_round(x, _BFLOAT16_LACKS) for x in values[1:])
        if isinstance(out, RoundedRows):
            _write_parts(out.values, place, _Parts(codes * scale[:, None], even, odd), row)
            return
        scatter(out.codes, *place, row.channels.kept, value=codes, mask=row.inside.kept)
        pair = 2 * jnp.arange(even.shape[0])
        scatter(out.rotary, *place, pair, value=even, mask=row.inside.even)
        scatter(out.rotary, *place, pair + 1, value=odd, mask=row.inside.odd)
        block = jnp.arange(exponents.shape[0])
        blocks = pl.cdiv(out.codes.shape[-1], ROW_BLOCK)
        shifted = exponents.astype(jnp.int32) << (block % 4 * 8)
        for word in range(out.scales.shape[-1]):
            own = (block < blocks) & (block // 4 == word)
            packed = jnp.sum(jnp.where(own, shifted, 0))
            scatter(out.scales, *place, word, value=packed, mask=row.exists)
    else:
        _write_parts(out, place, values, row)


def _write_parts(out: Any, place: tuple[jax.Array, ...], values: _Parts, row: _Row) -> None:
    """Store the channels of a row in an array [..., D]."""
    for channel, value, mask in zip(row.channels, values, row.inside):
        scatter(out, *place, channel, value=value, mask=mask)


def _reduced(reduce: Any, combine: Any, parts: _Parts) -> jax.Array:
    """All channels of a row in one value."""
    return combine(reduce(reduce(parts.kept, axis=1)), reduce(combine(parts.even, parts.odd)))


def _scales(exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bytes of `scale_exponents`, far from the ends of ue8m0, as float32 powers of two, and their inverses."""
    wide = exponents.astype(jnp.int32)
    scale, inverse = (lax.bitcast_convert_type(x << 23, jnp.float32) for x in (wide, 254 - wide))
    return scale, inverse


def _round(x: jax.Array, lacks: int) -> jax.Array:
    """Float32 x without its mantissa's last `lacks` bits, rounded half to even."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    below_half = (1 << (lacks - 1)) - 1
    rounded = (bits + below_half + ((bits >> lacks) & 1)) & (-1 << lacks)
    # A mantissa of ones, as a GPU's NaN has it, would run over.
    return jnp.where(x == x, lax.bitcast_convert_type(rounded, jnp.float32), x)


def _round_to_e4m3(x: jax.Array) -> jax.Array:
    """Float32 x within 448 as e4m3 has it; NaN for infinity, which a GPU would convert to 448."""
    # Adding and subtracting a large number would do, had XLA not let both go.
    steps = jnp.abs(x) * (1 / _SUBNORMAL_STEP)
    whole = steps.astype(jnp.int32)
    rest = steps - whole.astype(jnp.float32)
    is_up = (rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))
    subnormal = (whole + is_up.astype(jnp.int32)).astype(jnp.float32) * _SUBNORMAL_STEP
    # Zero keeps its sign; the lowering negates by a subtraction from zero, which would lose it.
    bits, sign = (lax.bitcast_convert_type(v, jnp.int32) for v in (subnormal, x))
    subnormal = lax.bitcast_convert_type(bits | (sign & jnp.int32(-(2**31))), jnp.float32)
    rounded = jnp.where(jnp.abs(x) < _LEAST_NORMAL, subnormal, _round(x, _E4M3_LACKS))
    return jnp.where(jnp.abs(rounded) <= _LARGEST, rounded, jnp.nan)
