"""Products with stored weights inside Triton kernels: plain, block-scaled fp8, packed fp4.

fp8 and fp4 values become float16, which holds them exactly; sums are float32. An fp8 block scale multiplies the
partial sum of its block. An fp4 run scale multiplies the value in float16: exact for scales from 2**-20 to 2**9, a
smaller one counts as zero (a run below 6e-6) and a larger one as 2**9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from dspark_jax.kernels.addressing import is_addressable
from dspark_jax.kernels.quantized import (
    FP4_RUN,
    FP4_WORD,
    FP8_BLOCK,
    Fp4Weight,
    Fp8Weight,
    SplitStack,
    Weight,
    take,
)
from dspark_jax.kernels.triton import dot

# A nibble s e e m moved into an e4m3 byte is its value times 2**-6, subnormal 0.5 included. Four bytes at a time:
# place them, convert two and two, multiply by the scale, which carries 2**6.
_PLACE = {
    "low": "shl.b32 t, $2, 4; shl.b32 u, $2, 2;",
    "high": "mov.b32 t, $2; shr.b32 u, $2, 2;",
}
_DECODE = """{{
.reg .b32 t, u, p, q;
.reg .b16 a, b;
{place}
and.b32 t, t, 0x80808080;
and.b32 u, u, 0x1c1c1c1c;
or.b32 t, t, u;
mov.b32 {{a, b}}, t;
cvt.rn.f16x2.e4m3x2 p, a;
cvt.rn.f16x2.e4m3x2 q, b;
mul.rn.f16x2 $0, p, $3;
mul.rn.f16x2 $1, q, $4;
}}"""


def weight_arrays(weight: Weight) -> tuple[jax.Array, ...]:
    """The arrays of a weight in the order in which `product` takes their refs."""
    if isinstance(weight, Fp4Weight):
        return weight.packed, weight.scale
    if isinstance(weight, Fp8Weight):
        return weight.weight, weight.scale
    return (weight,)


def is_reachable(stack: Weight) -> bool:
    """Whether kernels can read all of a stack where it lies."""
    return all(is_addressable(array) for array in weight_arrays(stack))


def reachable(stack: Weight | SplitStack, layer: jax.Array | int) -> tuple[Weight, jax.Array]:
    """A stack and the index of a layer, int32 [1], as a kernel takes them.

    Of a stack with more one-byte elements than offsets reach (2**31 to 2**32: three layers of Flash's w2 in fp4,
    61 of Pro's w_o_a) the layer is cut out, which costs a copy, unless it has been split at start.
    """
    if isinstance(stack, SplitStack):
        return reachable(stack.parts[int(layer)], 0)
    if not is_reachable(stack):
        cut: Weight = jax.tree.map(lambda leaf: leaf[None], take(stack, (layer,)))
        stack, layer = cut, 0
    return stack, jnp.asarray(layer, jnp.int32).reshape(1)


def operand(x: jax.Array, weight: Weight) -> jax.Array:
    """x [..., K] as `product` reads it beside `weight`: in its dtype, and [2, ..., K/2] beside packed fp4."""
    if isinstance(weight, Fp4Weight):
        halves = x.astype(jnp.float16).reshape(*x.shape[:-1], -1, 2)
        return jnp.moveaxis(halves, -1, 0)
    return x.astype(operand_dtype(weight))


def operand_dtype(weight: Weight) -> Any:
    """Dtype of activations that meet `weight` in a product."""
    return jnp.float16 if isinstance(weight, Fp4Weight | Fp8Weight) else weight.dtype


def power_of_two_factor(size: int, most: int) -> int:
    """Largest power of two that divides `size`, at most `most`; ValueError below 16, the least tile side."""
    factor = min(size & -size, 1 << most.bit_length() - 1)
    if factor < 16:
        raise ValueError(f"a matrix side of {size} is no multiple of 16")
    return factor


def product(
    load_x: Callable[..., jax.Array],
    refs: tuple[Any, ...],
    lead: tuple[jax.Array, ...],
    columns: jax.Array,
    *,
    rows: int,
    inner: int,
    depth: int,
    interpret: bool,
    part: tuple[jax.Array | int, int] = (0, 1),
) -> jax.Array:
    """x times the rows `columns` of a stored matrix [N, K], transposed: float32 [rows, len(columns)].

    Args:
      load_x: called with int32 [k], input columns, gives x [rows, k]. Beside fp4 it is called with the half (0 or
        1) first and columns of that half.
      refs: of `weight_arrays`, stacked by the axes that `lead` indexes.
      inner: K. depth: the most input columns per iteration.
      part: (i, n) sums only the i-th of n equal parts of the input; n divides the number of iterations.
    """
    depth = power_of_two_factor(inner, depth)
    if refs[0].dtype == jnp.uint8:
        depth = min(depth, FP4_WORD)
        step = _fp4_step(load_x, refs, lead, columns, depth, interpret)
    elif len(refs) == 2:
        depth = min(depth, FP8_BLOCK)
        step = _fp8_step(load_x, refs, lead, columns, depth)
    else:
        step = _plain_step(load_x, refs, lead, columns, depth)
    start = jnp.zeros((rows, columns.shape[0]), jnp.float32)
    number, parts = part
    steps = inner // depth // parts
    return lax.fori_loop(0, steps, lambda i, total: step(number * steps + i, total), start)


def _load(ref: Any, lead: tuple[jax.Array, ...], rows: jax.Array, columns: jax.Array) -> jax.Array:
    """ref[lead, rows, columns] as [rows, columns]."""
    shape = (rows.shape[0], columns.shape[0])
    index = (*lead, rows[:, None], columns[None])
    return plt.load(ref.at[tuple(jnp.broadcast_to(i, shape) for i in index)])


def _plain_step(load_x, refs, lead, columns, depth):
    def step(i, total):
        k = i * depth + jnp.arange(depth)
        return total + dot(load_x(k), _load(refs[0], lead, columns, k), transpose_b=True)

    return step


def _fp8_step(load_x, refs, lead, columns, depth):
    weight, scale = refs
    block = columns // FP8_BLOCK

    def step(i, total):
        k = i * depth + jnp.arange(depth)
        w = _load(weight, lead, columns, k).astype(jnp.float16)
        place = (*lead, block, i * depth // FP8_BLOCK)
        exponent = plt.load(scale.at[tuple(jnp.broadcast_to(j, block.shape) for j in place)])
        factor = lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
        return total + dot(load_x(k), w, transpose_b=True) * factor[None]

    return step


def _fp4_step(load_x, refs, lead, columns, depth, interpret):
    packed, scale = refs
    num_bytes, num_runs = depth // 2, depth // FP4_RUN
    if not num_runs:
        raise ValueError(f"fp4 weights need input columns in multiples of {FP4_RUN}")
    decode = _decode_plainly if interpret else _decode
    shape = (columns.shape[0], num_runs, FP4_RUN // 2)

    def step(i, total):
        place = i * num_bytes + jnp.arange(num_bytes)
        codes = _load(packed, lead, columns, place)
        first_run = i * num_runs
        word_place = (*lead, first_run >> 2, columns)
        word = plt.load(scale.at[tuple(jnp.broadcast_to(j, columns.shape) for j in word_place)])
        byte = (first_run & 3) + jnp.arange(num_runs)
        exponent = (word[:, None] >> (8 * byte)[None]) & 0xFF
        # 2**(exponent - 127 + 6) as the bits of a float16.
        bits = jnp.clip(exponent - 106, 0, 30) << 10
        factor = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)
        factor = jnp.broadcast_to(factor[:, :, None], shape).reshape(codes.shape)
        for half, nibble in enumerate(("low", "high")):
            w = decode(codes, factor, nibble)
            total = total + dot(load_x(half, place), w, transpose_b=True)
        return total

    return step


def _decode(codes: jax.Array, factor: jax.Array, nibble: str) -> jax.Array:
    """float16 values of the low or high nibbles of `codes` times 2**-6 times `factor`, all of one shape."""
    (values,) = plt.elementwise_inline_asm(
        _DECODE.format(place=_PLACE[nibble]),
        args=[codes, factor],
        constraints="=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float16)],
    )
    return values


def _decode_plainly(codes: jax.Array, factor: jax.Array, nibble: str) -> jax.Array:
    """`_decode` without assembly, for interpreted runs."""
    code = codes.astype(jnp.int32) >> (4 if nibble == "high" else 0)
    bits = (code & 8) << 12 | (code & 7) << 9  # value * 2**-14 as the bits of a float16
    value = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)
    return value * jnp.float16(2**8) * factor
