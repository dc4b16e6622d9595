"""Triton kernel of `route`: one launch, a few tokens per program.

k rounds take the highest score + bias that is left. Floats are compared as integers of the same order, because a
GPU reduces integers over a warp in one instruction; a NaN then also stays what it is, the highest. One warp per
program keeps every reduction within a warp, so that a round has no barrier.
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
from dspark_jax.kernels.order import ordered_bits
from dspark_jax.kernels.triton import gather, multiprocessors, scatter, triton_call

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """`tokens` of one program, a power of two, and its `warps`."""

    tokens: int
    warps: int


def default_tile(*, tokens: int, capability: int) -> Tile:
    """Tile for `tokens` tokens: one per program while all run at once, 32 on a multiprocessor, else two.

    A round waits for its reductions; other programs fill that time, or a second token of the same one.
    """
    resident = 32 * multiprocessors(capability)
    return Tile(tokens=1 if tokens <= resident else 2, warps=1)


def route_pallas(
    logits,
    bias,
    is_token,
    table,
    token_ids,
    *,
    layer,
    k,
    scale,
    dispatch: Dispatch,
    tile: Tile | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `route`; `tile` overrides the default sizes."""
    tokens = logits.shape[0]
    tile = tile or default_tile(tokens=tokens, capability=dispatch.capability)
    return triton_call(
        partial(_route, block=tile.tokens, k=k, scale=scale),
        jnp.asarray(layer, jnp.int32).reshape(1),
        logits,
        bias,
        is_token,
        *(() if table is None else (table, token_ids)),
        grid=(pl.cdiv(tokens, tile.tokens),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        ),
        name="route",
        dispatch=dispatch,
        num_warps=tile.warps,
    )


def _route(
    layer: Any,
    logits: Any,
    bias: Any,
    is_token: Any,
    *refs: Any,
    block: int,
    k: int,
    scale: float,
) -> None:
    """Body: one block of tokens.

    layer [1]; logits [T, E]; bias [L, E]; is_token [T]; table [H, V, k] and token_ids [T] or neither; out
    expert_ids and weights [T, k].
    """
    *hashed, ids_out, weights_out = refs
    tokens, experts = logits.shape
    token = pl.program_id(0) * block + jnp.arange(block)
    inside = token < tokens
    expert = jnp.arange(pl.next_power_of_2(experts))[None]
    valid = inside[:, None] & (expert < experts)
    scores = jnp.sqrt(jax.nn.softplus(gather(logits, token[:, None], expert, mask=valid)))
    biased = scores + gather(bias, layer[0], expert, mask=expert < experts)
    order = jnp.where(valid, _order(biased), _LOWEST)
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    is_real = gather(is_token, token, mask=inside)
    if hashed:
        table, token_ids = hashed
        is_fixed = is_real & (layer[0] < table.shape[0])
        row = gather(token_ids, token, mask=is_fixed)

    def choose(j, carry):
        order, ids, chosen, total = carry
        top = jnp.max(order, axis=1)
        number = jnp.min(jnp.where(order == top[:, None], expert, experts), axis=1)
        order = jnp.where(expert == number[:, None], _LOWEST, order)
        if hashed:
            fixed = gather(table, layer[0], row, j, mask=is_fixed)
            number = jnp.where(is_fixed, fixed, number)
        # The only term of a sum of integers is what it was, and no other lane's NaN joins it.
        picked = jnp.sum(jnp.where(expert == number[:, None], bits, 0), axis=1)
        score = lax.bitcast_convert_type(picked, jnp.float32)
        # Results lie where experts do: an array of k columns would have another layout.
        place = expert == j
        ids = jnp.where(place, number[:, None], ids)
        chosen = jnp.where(place, score[:, None], chosen)
        return order, ids, chosen, total + score

    start = (
        order,
        jnp.zeros(order.shape, jnp.int32),
        jnp.zeros(order.shape, jnp.float32),
        jnp.zeros(block, jnp.float32),
    )
    _, ids, chosen, total = lax.fori_loop(0, k, choose, start)
    weights = chosen / (total + 1e-20)[:, None] * scale
    is_stored = inside[:, None] & (expert < k)
    is_real = is_real[:, None]
    out = (token[:, None], expert)
    scatter(ids_out, *out, value=jnp.where(is_real, ids, experts), mask=is_stored)
    scatter(weights_out, *out, value=jnp.where(is_real, weights, 0.0), mask=is_stored)


def _order(x: jax.Array) -> jax.Array:
    """int32 that order as the float32 x do, above the lowest integer; NaN of either sign is the highest."""
    return jnp.where(x == x, ordered_bits(x), _HIGHEST)
