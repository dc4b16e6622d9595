"""Triton kernel of `stacked_linear`: a block of tokens times a block of rows of the matrix.

For few tokens reading the matrix is all that counts: blocks of rows give too few programs to fill the device, so
the sum is cut into splits, which XLA adds in a fixed order. For many tokens the matrix units count, and the
library's product is faster than a kernel that decodes weights for every block of tokens: then the layer is
expanded once, into a copy that lives as long as the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.linear.reference import stacked_linear_reference
from dspark_jax.kernels.quantized import Weight
from dspark_jax.kernels.triton import gather, multiprocessors, row_block, scatter, triton_call
from dspark_jax.kernels.weight_tile import (
    QUARTERS,
    operand,
    power_of_two_factor,
    product,
    reachable,
    weight_arrays,
    weight_bits,
)

MANY_TOKENS = 512
"""From here on the layer is expanded. On an H200 the two ways are level here, 0.45 and 0.43 ms for the linears of
a layer of Flash in fp8; the kernel takes 0.8 of the time at 256 tokens and 1.5 times as long at 1024."""


@dataclass(frozen=True)
class Tile:
    """Tokens by rows of the matrix by input columns of one tile, parts of the sum, and the launch.

    `weights_first`: see `product`.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    weights_first: bool = False


def default_tile(*, tokens: int, outputs: int, inner: int, bits: int, capability: int) -> Tile:
    """Tile for `tokens` tokens and a matrix [outputs, inner] of weights of so many bits.

    Measured on an H200; SM100 and SM103 start from the same sizes.
    """
    rows = row_block(tokens, 64)
    columns = power_of_two_factor(outputs, 128)
    depth = power_of_two_factor(inner, 128 if bits <= 8 else 64)
    weights_first = bits == 8 and rows == 64
    if weights_first and tokens > 256:
        rows = 128
    programs = pl.cdiv(tokens, rows) * outputs // columns
    wanted = max(1, min(16, multiprocessors(capability) // programs))
    # Splits divide the number of steps.
    splits = power_of_two_factor(inner // depth * 16, 16 * wanted) // 16
    return Tile(
        rows,
        columns,
        depth,
        splits,
        warps=8 if weights_first else 4,
        stages=4 if rows == 16 else 3,
        weights_first=weights_first,
    )


def stacked_linear_pallas(
    x: jax.Array, stack: Weight, *, layer, dispatch: Dispatch, tile: Tile | None = None
) -> jax.Array:
    """See `stacked_linear`; `tile` overrides the default sizes and runs the kernel for any number of tokens."""
    tokens, groups, inner = x.shape
    if tile is None and tokens >= MANY_TOKENS:
        # The library's sums are float32 all the same, but it would write them out for another pass to round.
        return stacked_linear_reference(x, stack, layer=layer, written=x.dtype)
    outputs = stack.shape[-2] // groups
    tile = tile or default_tile(
        tokens=tokens,
        outputs=outputs * groups,
        inner=inner,
        bits=weight_bits(stack),
        capability=dispatch.capability,
    )
    columns = power_of_two_factor(outputs, tile.columns)
    stack, layer = reachable(stack, layer)
    out = triton_call(
        partial(_product, tile=tile, columns=columns, interpret=dispatch.interpret),
        layer,
        operand(x, stack),
        *weight_arrays(stack),
        grid=(outputs * groups // columns, pl.cdiv(tokens, tile.rows), tile.splits),
        out_shape=jax.ShapeDtypeStruct(
            (tile.splits, tokens, groups * outputs), jnp.float32 if tile.splits > 1 else x.dtype
        ),
        name="linear",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return jnp.sum(out, axis=0).astype(x.dtype).reshape(tokens, groups, outputs)


def _product(layer: Any, x: Any, *refs: Any, tile: Tile, columns: int, interpret: bool) -> None:
    """Body: `columns` rows of the matrix, one block of tokens, one part of the input.

    layer [1]; x [T, G, K] or quarters [4, T, G, K/4]; matrix [L, G*N, K]; out [splits, T, G*N].
    """
    *weight, out = refs
    block, split = pl.program_id(0), pl.program_id(2)
    tokens, groups = x.shape[-3:-1]
    inner = x.shape[-1] * (QUARTERS if len(x.shape) == 4 else 1)
    token = pl.program_id(1) * tile.rows + jnp.arange(tile.rows)
    is_token = token < tokens
    column = block * columns + jnp.arange(columns)
    group = block * columns * groups // out.shape[2]

    def load_x(*index):
        *lead, channel = index
        return gather(x, *lead, token[:, None], group, channel[None], mask=is_token[:, None])

    value = product(
        load_x,
        tuple(weight),
        (layer[0],),
        column,
        rows=tile.rows,
        inner=inner,
        depth=tile.depth,
        part=(split, tile.splits),
        weights_first=tile.weights_first,
        interpret=interpret,
    )
    scatter(out, split, token[:, None], column[None], value=value, mask=is_token[:, None])
