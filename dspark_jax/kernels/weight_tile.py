"""Products with stored weights inside Triton kernels: plain, block-scaled fp8, packed fp4.

fp8 and fp4 values become float16, which holds them exactly; sums are float32. An fp8 block scale multiplies the
partial sum of its block. An fp4 run scale multiplies the value in float16: exact for scales from 2**-20 to 2**9, a
smaller one counts as zero (a run below 6e-6) and a larger one as 2**9.

What limits few rows beside fp4 is the number of instructions and how much of a row is read at once. The four codes
of a word go into four products, each with its quarter of the input columns, so nothing moves between registers:
the matrix units take words of two bytes in the layout of the activations, which single bytes do not allow.

From 64 rows the units of SM90 read weights from shared memory, and every product waits for the one before it. Then
codes are decoded into the order of the columns, and one product takes them all.
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
    Weight,
    take,
)
from dspark_jax.kernels.triton import dot, multiply_add

QUARTERS = 4
"""Parts of the input columns beside fp4: the first columns of every four, the second, the third, the fourth."""

# A nibble s e e m moved into an e4m3 byte is its value times 2**-6, subnormal 0.5 included. Of two words: bring
# their first bytes together and their second ones, place the low or the high nibbles of all four, convert two,
# multiply by the scale, which carries 2**6. The assembler finds what the quarters have in common.
_PLACE = ("shl.b32 t, p, 4; shl.b32 u, p, 2;", "mov.b32 t, p; shr.b32 u, p, 2;")
_DECODE = """{{
.reg .b32 t, u, p;
.reg .b16 a, b;
prmt.b32 p, $1, $1, 0x3120;
{place}
and.b32 t, t, 0x80808080;
and.b32 u, u, 0x1c1c1c1c;
or.b32 t, t, u;
mov.b32 {{a, b}}, t;
cvt.rn.f16x2.e4m3x2 p, {byte};
mul.rn.f16x2 $0, p, $2;
}}"""

# Of two words: the first or the last two codes of each, in order. Low nibbles are placed as above, high ones
# beside them, and the bytes of a word brought together. Each word has its own scale, wherever a layout takes the
# two from.
_DECODE_PAIRS = """{{
.reg .b32 t, u, v, p;
.reg .b16 a, b, c, d;
shl.b32 t, $2, 4; shl.b32 u, $2, 2;
and.b32 t, t, 0x80808080;
and.b32 u, u, 0x1c1c1c1c;
or.b32 t, t, u;
shr.b32 u, $2, 2;
and.b32 v, $2, 0x80808080;
and.b32 u, u, 0x1c1c1c1c;
or.b32 u, u, v;
mov.b32 {{c, d}}, $3;
prmt.b32 p, t, u, 0x5140;
mov.b32 {{a, b}}, p;
cvt.rn.f16x2.e4m3x2 p, {byte};
mov.b32 v, {{c, c}};
mul.rn.f16x2 $0, p, v;
prmt.b32 p, t, u, 0x7362;
mov.b32 {{a, b}}, p;
cvt.rn.f16x2.e4m3x2 p, {byte};
mov.b32 v, {{d, d}};
mul.rn.f16x2 $1, p, v;
}}"""

# Two exponents of a word of four, as the float16 numbers 2**(exponent - 127 + 6): a half of the register each.
_LEAST, _MOST = 106, 136
_SCALES = f"""{{{{
.reg .b32 t, u;
shr.b32 t, $1, {{shift}};
and.b32 t, t, 0x00ff00ff;
mov.b32 u, {_LEAST * 0x10001};
max.u16x2 t, t, u;
sub.u32 t, t, u;
mov.b32 u, {(_MOST - _LEAST) * 0x10001};
min.u16x2 t, t, u;
shl.b32 $0, t, 10;
}}}}"""


def weight_arrays(weight: Weight) -> tuple[jax.Array, ...]:
    """The arrays of a weight in the order in which `product` takes their refs."""
    if isinstance(weight, Fp4Weight):
        return weight.packed, weight.scale
    if isinstance(weight, Fp8Weight):
        return weight.weight, weight.scale
    return (weight,)


def weight_bits(weight: Weight) -> int:
    """Bits of a stored value, without its scale."""
    return 4 if isinstance(weight, Fp4Weight) else 8 * weight_arrays(weight)[0].dtype.itemsize


def reachable(stack: Weight, layer: jax.Array | int) -> tuple[Weight, jax.Array]:
    """A stack and the index of a layer, int32 [1], as a kernel takes them.

    Of a stack with more one-byte elements than offsets reach (2**31 to 2**32: 61 layers of Pro's w_o_a) the layer
    is cut out, which costs a copy.
    """
    if not all(is_addressable(array) for array in weight_arrays(stack)):
        cut: Weight = jax.tree.map(lambda leaf: leaf[None], take(stack, (layer,)))
        stack, layer = cut, 0
    return stack, jnp.asarray(layer, jnp.int32).reshape(1)


def operand(x: jax.Array, weight: Weight, *, in_order: bool = False) -> jax.Array:
    """x [..., K] as `product` reads it beside `weight`: in its dtype, and beside fp4 in quarters [4, ..., K/4].

    `in_order` leaves the columns as they are, see `product`.
    """
    x = x.astype(operand_dtype(weight))
    if in_order or not isinstance(weight, Fp4Weight):
        return x
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, QUARTERS), -1, 0)


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
    weights_first: bool = False,
    in_order: bool = False,
) -> jax.Array:
    """x times the rows `columns` of a stored matrix [N, K], transposed: float32 [rows, len(columns)].

    Args:
      load_x: called with int32 [k], input columns, gives x [rows, k]. Beside fp4 it is called with the quarter
        first and places of that quarter.
      refs: of `weight_arrays`, stacked by the axes that `lead` indexes.
      inner: K. depth: the most input columns per iteration.
      part: (i, n) sums only the i-th of n equal parts of the input; n divides the number of iterations.
      weights_first: fp8 weights become the first operand of the product, which the matrix units of SM90 take from
        registers, as conversion leaves them. No effect on other weights.
      in_order: fp4 weights are decoded into the order of the columns, and `load_x` is called as beside others.
    """
    depth = power_of_two_factor(inner, depth)
    if refs[0].dtype == jnp.int16:
        step = _fp4_step(load_x, refs, lead, columns, depth, in_order, interpret)
    elif len(refs) == 2:
        depth = min(depth, FP8_BLOCK)
        step = _fp8_step(load_x, refs, lead, columns, depth, weights_first, interpret)
    else:
        step = _plain_step(load_x, refs, lead, columns, depth)
    turned = weights_first and refs[0].dtype == jnp.float8_e4m3fn
    shape = (columns.shape[0], rows) if turned else (rows, columns.shape[0])
    number, parts = part
    steps = inner // depth // parts
    total = lax.fori_loop(
        0, steps, lambda i, total: step(number * steps + i, total), jnp.zeros(shape, jnp.float32)
    )
    return total.T if turned else total


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


def _fp8_step(load_x, refs, lead, columns, depth, weights_first, interpret):
    weight, scale = refs
    block = columns // FP8_BLOCK

    def step(i, total):
        k = i * depth + jnp.arange(depth)
        w = _load(weight, lead, columns, k).astype(jnp.float16)
        place = (*lead, block, i * depth // FP8_BLOCK)
        exponent = plt.load(scale.at[tuple(jnp.broadcast_to(j, block.shape) for j in place)])
        factor = lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
        if weights_first:
            value, factor = dot(w, load_x(k), transpose_b=True), factor[:, None]
        else:
            value, factor = dot(load_x(k), w, transpose_b=True), factor[None]
        return multiply_add(value, factor, total, interpret=interpret)

    return step


def _fp4_step(load_x, refs, lead, columns, depth, in_order, interpret):
    packed, scale = refs
    word_depth = min(depth, FP4_WORD)  # of the columns whose scales share a word
    num_places, num_runs = word_depth // QUARTERS, word_depth // FP4_RUN
    if num_places < 16:
        raise ValueError("fp4 weights need input columns in multiples of 64, sixteen per quarter")
    decode = _decode_plainly if interpret else _decode

    def word_step(i, total):
        place = i * num_places + jnp.arange(num_places)
        codes = _load(packed, lead, columns, place)
        run = jnp.arange(num_runs)
        if num_runs < 4:
            run += i * num_runs & 3
        word_place = (*lead, i * num_runs >> 2, columns)
        word = plt.load(scale.at[tuple(jnp.broadcast_to(j, columns.shape) for j in word_place)])
        factor = _run_scales(word, run, interpret)[:, :, None]
        factor = jnp.broadcast_to(factor, (*factor.shape[:2], num_places // num_runs))
        factor = factor.reshape(codes.shape)
        if in_order:
            w = _decode_in_order(codes, factor, interpret)
            k = i * word_depth + jnp.arange(word_depth)
            return total + dot(load_x(k), w, transpose_b=True)
        for quarter in range(QUARTERS):
            w = decode(codes, factor, quarter)
            total = total + dot(load_x(quarter, place), w, transpose_b=True)
        return total

    def step(i, total):
        words = depth // word_depth
        for word in range(words):
            total = word_step(i * words + word, total)
        return total

    return step


def _run_scales(word: jax.Array, run: jax.Array, interpret: bool) -> jax.Array:
    """float16 [N, n]: 2**6 times the scales of the runs int32 [n], 0..3, of int32 [N] words."""
    if interpret:
        exponent = (word[:, None] >> (8 * run)[None]) & 0xFF
        bits = (jnp.clip(exponent, _LEAST, _MOST) - _LEAST) << 10
    else:
        even, odd = (_assembled(_SCALES.format(shift=shift), word) for shift in (0, 8))
        bits = jnp.where((run % 2 == 0)[None], even[:, None], odd[:, None]) >> (16 * (run // 2))
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)


def _assembled(text: str, word: jax.Array) -> jax.Array:
    (out,) = plt.elementwise_inline_asm(
        text,
        args=[word],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(word.shape, word.dtype)],
    )
    return out


def _decode(codes: jax.Array, factor: jax.Array, quarter: int) -> jax.Array:
    """float16 values of a quarter of the codes in int16 words times 2**-6 times `factor`, all of one shape."""
    (values,) = plt.elementwise_inline_asm(
        _DECODE.format(place=_PLACE[quarter % 2], byte="ab"[quarter // 2]),
        args=[codes, factor],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float16)],
    )
    return values


def _decode_plainly(codes: jax.Array, factor: jax.Array, quarter: int) -> jax.Array:
    """`_decode` without assembly, for interpreted runs."""
    code = codes.astype(jnp.int32) >> 4 * quarter
    bits = (code & 8) << 12 | (code & 7) << 9  # value * 2**-14 as the bits of a float16
    value = lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)
    return value * jnp.float16(2**8) * factor


def _decode_in_order(codes: jax.Array, factor: jax.Array, interpret: bool) -> jax.Array:
    """`_decode` of all quarters of [N, n] words: [N, 4n], in the order of the columns."""
    if interpret:
        quarters = [_decode_plainly(codes, factor, quarter) for quarter in range(QUARTERS)]
    else:
        quarters = [*_decode_pair(codes, factor, "a"), *_decode_pair(codes, factor, "b")]

    def join(a, b):
        return jnp.concatenate([a[..., None], b[..., None]], axis=-1)

    # A join adds the last axis, so the one that counts fastest comes last.
    even, odd = join(quarters[0], quarters[2]), join(quarters[1], quarters[3])
    return join(even, odd).reshape(codes.shape[0], -1)


def _decode_pair(codes: jax.Array, factor: jax.Array, half: str) -> tuple[jax.Array, jax.Array]:
    """`_decode` of two neighbouring quarters, those of the first byte of a word, `a`, or of the second, `b`."""
    (pairs,) = plt.elementwise_inline_asm(
        _DECODE_PAIRS.format(byte=half),
        args=[codes, factor],
        constraints="=r,=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int32)],
    )
    first, second = (
        lax.bitcast_convert_type(x.astype(jnp.int16), jnp.float16) for x in (pairs, pairs >> 16)
    )
    return first, second
