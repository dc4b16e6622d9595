"""Triton kernels that sort assignments by expert and cut each expert's share into row tiles, on the device.

An assignment is one (token, choice) pair, numbered token * k + choice. Those with an expert id of E or more are
padding and appear nowhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.triton import gather, loop, scatter, triton_call

_CHUNK = 1024


class Plan(NamedTuple):
    """Sorted assignments and the tiles over them; a tile never mixes experts."""

    order: jax.Array  # int32 [A] assignment at each sorted place, experts ascending, stable
    experts: jax.Array  # int32 [tiles]
    begins: jax.Array  # int32 [tiles] first sorted place of the tile
    counts: jax.Array  # int32 [tiles] rows in the tile, 0 for an unused one


def make_plan(expert_ids: jax.Array, *, experts: int, rows: int, dispatch: Dispatch) -> Plan:
    """Plan for int32 [T, k] expert ids with tiles of at most `rows` rows.

    There are min(E, A) + A // rows tiles: that many are needed in the worst case, usually fewer are used.
    """
    ids = expert_ids.reshape(-1)
    assignments = ids.shape[0]
    tiles = min(experts, assignments) + assignments // rows
    order, begins, counts = triton_call(
        _sort,
        ids,
        grid=(experts,),
        out_shape=tuple(
            jax.ShapeDtypeStruct((n,), jnp.int32) for n in (assignments, experts, experts)
        ),
        name="expert_sort",
        dispatch=dispatch,
        num_warps=4,
    )
    tiled = triton_call(
        partial(_cut, rows=rows),
        begins,
        counts,
        grid=(1,),
        out_shape=(jax.ShapeDtypeStruct((tiles,), jnp.int32),) * 3,
        name="expert_tiles",
        dispatch=dispatch,
        num_warps=4,
    )
    return Plan(order, *tiled)


def _sort(ids: Any, order: Any, begins: Any, counts: Any) -> None:
    """Body: one expert finds its assignments. ids [A] -> its run of order [A], begins [E], counts [E]."""
    expert = pl.program_id(0)
    total = ids.shape[0]
    chunks = pl.cdiv(total, _CHUNK)
    lane = jnp.arange(_CHUNK)

    def chunk(i):
        index = i * _CHUNK + lane
        inside = index < total
        return index, jnp.where(inside, gather(ids, index, mask=inside), jnp.int32(2**30))

    def count(i, carry):
        below, own = carry
        _, found = chunk(i)
        return (
            below + jnp.sum((found < expert).astype(jnp.int32)),
            own + jnp.sum((found == expert).astype(jnp.int32)),
        )

    begin, own = loop(0, chunks, count, (jnp.int32(0), jnp.int32(0)))

    def place(i, place):
        index, found = chunk(i)
        mine = found == expert
        rank = jnp.cumsum(mine.astype(jnp.int32))
        scatter(order, jnp.where(mine, place + rank - 1, total), value=index, mask=mine)
        return place + jnp.sum(mine.astype(jnp.int32))

    @pl.when(own > 0)
    def _():
        loop(0, chunks, place, begin)

    begins[expert] = begin
    counts[expert] = own


def _cut(
    begins: Any, counts: Any, tile_experts: Any, tile_begins: Any, tile_counts: Any, *, rows: int
) -> None:
    """Body, run once: begins and counts [E] -> expert, begin and count of every tile [tiles]."""
    experts, tiles = counts.shape[0], tile_counts.shape[0]
    expert = jnp.arange(pl.next_power_of_2(experts))
    is_expert = expert < experts
    begin = gather(begins, expert, mask=is_expert)
    count = gather(counts, expert, mask=is_expert)
    needed = pl.cdiv(count, rows)
    after = jnp.cumsum(needed)
    first = after - needed

    def write(i, carry):
        used = i < needed
        tile = jnp.where(used, first + i, tiles)
        scatter(tile_experts, tile, value=expert, mask=used)
        scatter(tile_begins, tile, value=begin + i * rows, mask=used)
        scatter(tile_counts, tile, value=jnp.minimum(count - i * rows, rows), mask=used)
        return carry

    loop(0, jnp.max(needed), write, jnp.int32(0))
    lane = jnp.arange(_CHUNK)
    total = jnp.sum(needed)
    zero = jnp.zeros(_CHUNK, jnp.int32)

    def clear(i, carry):
        tile = i * _CHUNK + lane
        for ref in (tile_experts, tile_begins, tile_counts):
            scatter(ref, tile, value=zero, mask=(tile >= total) & (tile < tiles))
        return carry

    loop(0, pl.cdiv(tiles, _CHUNK), clear, jnp.int32(0))
