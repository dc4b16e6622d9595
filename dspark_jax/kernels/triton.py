"""What every Triton kernel here shares: the call, and the limits of the lowering as checks.

Kernels receive whole arrays and index them themselves, because block specifications cannot depend on data such as
a layer index. Array sizes inside a kernel are powers of two; accumulation is float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dspark_jax.kernels.addressing import is_addressable
from dspark_jax.kernels.dispatch import Dispatch

# Every supported release still has this lowering; the notice would reach each user of the server.
warnings.filterwarnings(
    "ignore", message="The (Pallas )?Triton (lowering|backend)", category=DeprecationWarning
)

MASKED = -1e30
"""Score of what must not be chosen. Finite, so that differences of two such scores are not NaN."""

LOG2_E = 1.4426950408889634

_MULTIPROCESSORS = {90: 132, 100: 148, 103: 148}


def triton_call(
    body: Callable[..., None],
    *args: Any,
    grid: Sequence[int],
    out_shape: Any = None,
    in_place: Any = None,
    name: str,
    dispatch: Dispatch,
    num_warps: int,
    num_stages: int = 1,
) -> Any:
    """Run `body(*arg_refs, *out_refs)` once per point of `grid`; the first grid axis runs fastest.

    Arguments are arrays or trees of arrays, of which the body gets trees of refs. A tree `in_place` takes the
    place of `out_shape`: the result begins as these arrays, and is them where nothing else needs the old ones.

    Raises:
      ValueError: an argument has more elements than the lowering's 32-bit offsets can address.
    """
    aliases: dict[int, int] = {}
    run = body
    if in_place is not None:
        assert out_shape is None
        out_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), in_place)
        first, place = len(jax.tree.leaves(args)), len(args)
        aliases = {first + i: i for i in range(len(jax.tree.leaves(in_place)))}
        # The refs of the old arrays are those of the result, which the body gets once.
        run = lambda *refs: body(*refs[:place], *refs[place + 1 :])
        args = (*args, in_place)
    for array in jax.tree.leaves((args, out_shape)):
        if not is_addressable(array):
            raise ValueError(
                f"{name}: an array of {array.size} one-byte elements overflows 32-bit offsets; "
                "split it or pad it beyond 4 GiB"
            )
    if 0 in grid:
        raise ValueError(f"{name}: empty grid {tuple(grid)}")
    return pl.pallas_call(
        run,
        grid=tuple(grid),
        out_shape=out_shape,
        input_output_aliases=aliases,
        interpret=dispatch.interpret,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name=name,
    )(*args)


def gather(ref: Any, *index: jax.Array | int, mask: jax.Array | None) -> jax.Array:
    """Elements of `ref` at broadcast indices, zero where `mask` is false; those are not read. None reads all.

    All arrays broadcast to one shape, as interpreted masked loads require.
    """
    whole = () if mask is None else mask.shape
    shape = jnp.broadcast_shapes(whole, *(jnp.shape(i) for i in index))
    where = tuple(jnp.broadcast_to(i, shape) for i in index)
    if mask is None:
        return plt.load(ref.at[where])
    zero: Any = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    if ref.dtype == jnp.bool_:
        zero = False  # interpreted, an integer would make the result integers
    return plt.load(ref.at[where], mask=jnp.broadcast_to(mask, shape), other=zero)


def scatter(ref: Any, *index: jax.Array | int, value: jax.Array, mask: jax.Array) -> None:
    """Store `value`, cast to the dtype of `ref`, at broadcast indices where `mask` is true.

    No place may be named twice, by a masked lane either: interpreted, those write the old value back. Give such
    lanes an index beyond the end.
    """
    shape = jnp.broadcast_shapes(mask.shape, value.shape, *(jnp.shape(i) for i in index))
    where = tuple(jnp.broadcast_to(i, shape) for i in index)
    value = jnp.broadcast_to(value.astype(ref.dtype), shape)
    plt.store(ref.at[where], value, mask=jnp.broadcast_to(mask, shape))


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    """a [m, k] times b [k, n], or times b [n, k] transposed, in float32.

    Raises:
      ValueError: k is below 16: compiled, a shorter sum of 16-bit numbers counts its terms several times.
    """
    if a.shape[1] < 16:
        raise ValueError(f"a product sums {a.shape[1]} terms; the matrix units take 16 at least")
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, contract, precision=precision, preferred_element_type=jnp.float32
    )


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, *, interpret: bool) -> jax.Array:
    """a * b + c in float32, of the shape of c: compiled one instruction, where `*` and `+` stay two."""
    if interpret:
        return a * b + c
    (out,) = plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[jnp.broadcast_to(x, c.shape) for x in (a, b, c)],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, c.dtype)],
    )
    return out


def row_block(size: int, most: int) -> int:
    """Rows of a matrix-product tile for `size` rows: a power of two, 16 (the least there is) to `most`."""
    return max(16, min(most, pl.next_power_of_2(size)))


def multiprocessors(capability: int) -> int:
    """Multiprocessors of the GPU that has this compute capability (times ten); an H200's where it is unknown."""
    return _MULTIPROCESSORS.get(capability, 132)


def loop(begin: jax.Array | int, end: jax.Array | int, body: Callable, start: Any) -> Any:
    """`fori_loop` with int32 bounds read from memory: early exit instead of masked work."""
    return jax.lax.fori_loop(jnp.int32(begin), jnp.int32(end), body, start)


def computed_once(compute: Callable[[], Any], like: Any, index: jax.Array) -> Any:
    """`compute()`, a tree of arrays like `like`, whose arithmetic stays in front of the loops that use the result.

    The compiler repeats cheap arithmetic in a loop if that spares converting the result for a product there. It
    does not look into another loop: so this is one of a single turn. `index` is any number from 0 that is known at
    run time only, such as a program's, else the turn would be unrolled.
    """
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return loop(0, jnp.minimum(index + 1, 1), lambda _, __: compute(), start)
