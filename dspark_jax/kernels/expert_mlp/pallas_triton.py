"""Triton kernels of `expert_mlp`: two grouped matrix products over tiles of assignments with one expert each.

The first computes gate and up columns side by side and applies the clamped SwiGLU and the route weight; the second
writes one row per assignment, and the k rows of a token are summed in a fixed order, so the result does not depend
on scheduling. Column blocks run on the fastest grid axis: programs of a tile share its rows.

Quantised weights become float16 with float32 sums. A word of packed fp4 holds four columns, so for few rows
activations are split into quarters once and the weights need no shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.expert_mlp.plan import make_plan
from dspark_jax.kernels.quantized import Fp4Weight, Weight
from dspark_jax.kernels.triton import gather, scatter, triton_call
from dspark_jax.kernels.weight_tile import (
    QUARTERS,
    operand,
    operand_dtype,
    power_of_two_factor,
    product,
    reachable,
    weight_arrays,
    weight_bits,
)


@dataclass(frozen=True)
class Tile:
    """Assignments by output columns by input columns of one tile, and the launch.

    `weights_first` and `in_order`: see `product`.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    weights_first: bool = False
    in_order: bool = False


def default_tile(*, assignments: int, experts: int, bits: int, capability: int) -> Tile:
    """Tile for `assignments` over `experts` experts and weights of so many bits.

    Measured on H200: up to about 12 rows per expert reading weights is all that counts, and memory gives its full
    rate only where 128 bytes of a row are read at once; from 24 the matrix units count. SM100 and SM103 start from
    the same sizes.
    """
    del capability
    few, several, some, many = (assignments <= rows * experts for rows in (12, 18, 24, 64))
    if bits == 4 and few:
        return Tile(16, columns=128, depth=256, warps=4, stages=2)
    if bits == 4 and some:
        return Tile(32, columns=128, depth=256 if several else 128, warps=4, stages=3)
    if bits == 4 and many:
        return Tile(64, columns=128, depth=64, warps=4, stages=3, in_order=True)
    if bits == 4:
        return Tile(128, columns=128, depth=64, warps=8, stages=4, in_order=True)
    return Tile(
        16 if few else 32 if some else 64,
        columns=128,
        depth=128 if bits == 8 else 64,
        warps=4,
        stages=4 if few else 3,
        weights_first=bits == 8 and not some,
    )


def expert_mlp_pallas(
    x,
    expert_ids,
    weights,
    w_gate_up: Weight,
    w_down: Weight,
    *,
    layer,
    limit,
    dispatch: Dispatch,
    tile: Tile | None = None,
) -> jax.Array:
    """See `expert_mlp` for arguments and result; `tile` overrides the default sizes."""
    tokens, k = expert_ids.shape
    experts, width = w_gate_up.shape[1], w_gate_up.shape[2] // 2
    model = x.shape[1]
    w_gate_up, up_layer = reachable(w_gate_up, layer)
    w_down, down_layer = reachable(w_down, layer)
    tile = tile or default_tile(
        assignments=tokens * k,
        experts=experts,
        bits=weight_bits(w_gate_up),
        capability=dispatch.capability,
    )
    plan = make_plan(expert_ids, experts=experts, rows=tile.rows, dispatch=dispatch)
    tiles = plan.counts.shape[0]
    half = power_of_two_factor(width, tile.columns // 2)
    quartered = isinstance(w_down, Fp4Weight) and not tile.in_order
    hidden_shape = (tokens * k, width)
    if quartered:
        hidden_shape = (QUARTERS, tokens * k, width // QUARTERS)
    hidden = triton_call(
        partial(
            _gate_up,
            tile=tile,
            half=half,
            k=k,
            limit=limit,
            quartered=quartered,
            interpret=dispatch.interpret,
        ),
        *plan,
        up_layer,
        operand(x, w_gate_up, in_order=tile.in_order),
        weights.reshape(-1),
        *weight_arrays(w_gate_up),
        grid=(width // half, tiles),
        out_shape=jax.ShapeDtypeStruct(hidden_shape, operand_dtype(w_down)),
        name="expert_gate_up",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    columns = power_of_two_factor(model, tile.columns)
    rows = triton_call(
        partial(_down, tile=tile, columns=columns, interpret=dispatch.interpret),
        *plan,
        down_layer,
        hidden,
        *weight_arrays(w_down),
        grid=(model // columns, tiles),
        out_shape=jax.ShapeDtypeStruct((tokens * k, model), row_dtype(x.dtype)),
        name="expert_down",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    # Rows of padding were never written.
    is_real = (expert_ids < experts)[..., None]
    rows = rows.reshape(tokens, k, model).astype(jnp.float32)
    return jnp.sum(jnp.where(is_real, rows, 0.0), axis=1)


def row_dtype(activations: Any) -> Any:
    """In which numbers the rows of single experts are written and read again.

    float16 keeps eight times the precision of bfloat16, to which their sum is rounded, and takes half the traffic
    of float32. What is beyond its range becomes its largest number.
    """
    return jnp.float16 if activations == jnp.bfloat16 else jnp.float32


def _gate_up(
    order: Any,
    tile_experts: Any,
    begins: Any,
    counts: Any,
    layer: Any,
    x: Any,
    route: Any,
    *refs: Any,
    tile: Tile,
    half: int,
    k: int,
    limit: float,
    quartered: bool,
    interpret: bool,
) -> None:
    """Body: `half` gate and as many up columns of one tile.

    Plan refs; layer [1]; x [T, M] or quarters [4, T, M/4]; route [A]; w_gate_up [L, E, 2F, M]; out hidden [A, F]
    or quarters [4, A, F/4] at sorted places.
    """
    *weight, hidden = refs
    block, number = pl.program_id(0), pl.program_id(1)
    count = counts[number]
    width = hidden.shape[-1] * (QUARTERS if quartered else 1)

    @pl.when(count > 0)
    def _():
        lane = jnp.arange(tile.rows)
        valid = lane < count
        place = begins[number] + lane
        assignment = gather(order, place, mask=valid)
        token = assignment // k

        # Columns of a block in the order in which they are stored: quarter by quarter if hidden is so.
        j = jnp.arange(2 * half)
        within = j % half
        if quartered:
            within = within % (half // QUARTERS) * QUARTERS + within // (half // QUARTERS)
        column = block * half + within + jnp.where(j < half, 0, width)

        def load_x(*index):
            *lead, channel = index
            return gather(x, *lead, token[:, None], channel[None], mask=valid[:, None])

        both = product(
            load_x,
            tuple(weight),
            (layer[0], tile_experts[number]),
            column,
            rows=tile.rows,
            inner=x.shape[-1] * (QUARTERS if len(x.shape) == 3 else 1),
            depth=tile.depth,
            weights_first=tile.weights_first,
            in_order=tile.in_order,
            interpret=interpret,
        )
        gate, up = lax.split(both.reshape(tile.rows, 2, half), (1, 1), axis=1)
        gate = jnp.minimum(gate.reshape(tile.rows, half), limit)
        up = jnp.clip(up.reshape(tile.rows, half), -limit, limit)
        weight_of = gather(route, assignment, mask=valid)
        value = gate / (1 + jnp.exp(-gate)) * up * weight_of[:, None]
        out = jnp.arange(half)
        if quartered:
            size = half // QUARTERS
            quarter, target = (out // size)[None], (block * size + out % size)[None]
            scatter(hidden, quarter, place[:, None], target, value=value, mask=valid[:, None])
        else:
            target = (block * half + out)[None]
            scatter(hidden, place[:, None], target, value=value, mask=valid[:, None])


def _down(
    order: Any,
    tile_experts: Any,
    begins: Any,
    counts: Any,
    layer: Any,
    hidden: Any,
    *refs: Any,
    tile: Tile,
    columns: int,
    interpret: bool,
) -> None:
    """Body: `columns` output columns of one tile.

    Plan refs; layer [1]; hidden as `_gate_up` wrote it; w_down [L, E, M, F]; out rows [A, M] by assignment.
    """
    *weight, rows = refs
    block, number = pl.program_id(0), pl.program_id(1)
    count = counts[number]

    @pl.when(count > 0)
    def _():
        lane = jnp.arange(tile.rows)
        valid = lane < count
        place = begins[number] + lane
        assignment = jnp.where(valid, gather(order, place, mask=valid), rows.shape[0])
        column = block * columns + jnp.arange(columns)

        def load_hidden(*index):
            *lead, channel = index
            return gather(hidden, *lead, place[:, None], channel[None], mask=valid[:, None])

        value = product(
            load_hidden,
            tuple(weight),
            (layer[0], tile_experts[number]),
            column,
            rows=tile.rows,
            inner=hidden.shape[-1] * (QUARTERS if len(hidden.shape) == 3 else 1),
            depth=tile.depth,
            weights_first=tile.weights_first,
            in_order=tile.in_order,
            interpret=interpret,
        )
        if rows.dtype == jnp.float16:
            most = float(jnp.finfo(jnp.float16).max)
            value = jnp.clip(value, -most, most)
        scatter(rows, assignment[:, None], column[None], value=value, mask=valid[:, None])
