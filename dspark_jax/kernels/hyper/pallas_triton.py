"""Triton kernels of `hyper_enter` (two: projection, then mixing) and `hyper_leave` (one).

The projection to (2+N)N values reads all streams of a token; few tokens are spread over the multiprocessors by
cutting the sum into splits. The second kernel adds the splits, balances the N x N matrix in registers, and reads
the streams once more, from the level-two cache at decode.
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
from dspark_jax.kernels.triton import dot, gather, scatter, triton_call
from dspark_jax.kernels.weight_tile import power_of_two_factor

LEAVE_COLUMNS = 1024


@dataclass(frozen=True)
class Tile:
    """Projection: `tokens` by `depth` input columns per step, the sum in `splits` parts; warps of both kernels."""

    tokens: int
    depth: int
    splits: int
    warps: int
    stages: int
    mix_warps: int


def default_tile(*, tokens: int, inner: int, capability: int) -> Tile:
    """Tile for `tokens` tokens of `inner` = N*M values. The same on every supported GPU."""
    del capability
    block = 16
    depth = power_of_two_factor(inner, 256)
    # About two programs per multiprocessor; splits divide the number of steps.
    wanted = max(1, min(32, 264 // pl.cdiv(tokens, block)))
    splits = power_of_two_factor(inner // depth * 16, 16 * wanted) // 16
    return Tile(tokens=block, depth=depth, splits=splits, warps=4, stages=3, mix_warps=8)


def hyper_enter_pallas(
    streams,
    w_fn,
    base,
    scale,
    gain,
    *,
    layer,
    iterations,
    eps,
    norm_eps,
    dispatch: Dispatch,
    tile: Tile | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `hyper_enter`; `tile` overrides the default sizes."""
    tokens, n, model = streams.shape
    if n & (n - 1):
        raise ValueError(f"hyper_enter: {n} streams are not a power of two")
    inner = n * model
    tile = tile or default_tile(tokens=tokens, inner=inner, capability=dispatch.capability)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    # The last column holds the sum of squares.
    columns = max(16, pl.next_power_of_2(w_fn.shape[1] + 1))
    sums = triton_call(
        partial(_project, tile=tile),
        layer,
        streams.reshape(tokens, inner),
        w_fn,
        grid=(tile.splits, pl.cdiv(tokens, tile.tokens)),
        out_shape=jax.ShapeDtypeStruct((tile.splits, tokens, columns), jnp.float32),
        name="hyper_project",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return triton_call(
        partial(_mix, iterations=iterations, eps=eps, norm_eps=norm_eps),
        layer,
        sums,
        streams,
        base,
        scale,
        gain,
        grid=(tokens,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, model), streams.dtype),
            jax.ShapeDtypeStruct((tokens, n), jnp.float32),
            jax.ShapeDtypeStruct((tokens, n, n), jnp.float32),
        ),
        name="hyper_mix",
        dispatch=dispatch,
        num_warps=tile.mix_warps,
    )


def hyper_leave_pallas(streams, output, post, comb, *, dispatch: Dispatch) -> jax.Array:
    """See `hyper_leave`."""
    tokens, _, model = streams.shape
    columns = min(LEAVE_COLUMNS, pl.next_power_of_2(model))
    return triton_call(
        partial(_leave, columns=columns),
        streams,
        output,
        post,
        comb,
        grid=(pl.cdiv(model, columns), tokens),
        out_shape=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        name="hyper_leave",
        dispatch=dispatch,
        num_warps=4,
    )


def _project(layer: Any, streams: Any, w_fn: Any, sums: Any, *, tile: Tile) -> None:
    """Body: one split of one block of tokens.

    layer [1]; streams [T, N*M]; w_fn [L, (2+N)N, N*M]; out sums [splits, T, columns].
    """
    split = pl.program_id(0)
    tokens, inner = streams.shape
    outputs, columns = w_fn.shape[1], sums.shape[2]
    token = pl.program_id(1) * tile.tokens + jnp.arange(tile.tokens)
    is_token = token < tokens
    column = jnp.arange(columns)
    steps = inner // tile.depth // tile.splits

    def step(i, carry):
        total, squares = carry
        k = (split * steps + i) * tile.depth + jnp.arange(tile.depth)
        x = gather(streams, token[:, None], k[None], mask=is_token[:, None])
        w = gather(w_fn, layer[0], column[:, None], k[None], mask=(column < outputs)[:, None])
        wide = x.astype(jnp.float32)
        squares = squares + jnp.sum(wide * wide, axis=1)
        if x.dtype == jnp.float32:
            return total + dot(x, w, transpose_b=True), squares
        # float32 weights as two terms: the products of the matrix units stay exact to 16 bits.
        high = w.astype(x.dtype)
        low = (w - high.astype(jnp.float32)).astype(x.dtype)
        total = total + dot(x, high, transpose_b=True) + dot(x, low, transpose_b=True)
        return total, squares

    start = jnp.zeros((tile.tokens, columns), jnp.float32), jnp.zeros(tile.tokens, jnp.float32)
    total, squares = lax.fori_loop(0, steps, step, start)
    total = jnp.where((column == columns - 1)[None], squares[:, None], total)
    scatter(sums, split, token[:, None], column[None], value=total, mask=is_token[:, None])


def _mix(
    layer: Any,
    sums: Any,
    streams: Any,
    base: Any,
    scale: Any,
    gain: Any,
    entered: Any,
    post_out: Any,
    comb_out: Any,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    """Body: one token.

    layer [1]; sums [splits, T, columns]; streams [T, N, M]; base [L, (2+N)N]; scale [L, 3]; gain [L, M];
    out entered [T, M], post [T, N], comb [T, N, N].
    """
    token = pl.program_id(0)
    splits, _, columns = sums.shape
    _, n, model = streams.shape
    own = layer[0]
    lane = jnp.arange(n)
    part = jnp.arange(splits)

    def total(column):
        """Sum over the splits of some columns [...] of this token."""
        index = jnp.broadcast_to(column[None], (splits, *column.shape))
        each = part.reshape(splits, *(1,) * column.ndim)
        every = jnp.full(index.shape, True)
        return jnp.sum(gather(sums, each, token, index, mask=every), axis=0)

    squares = jnp.sum(total(jnp.full(1, columns - 1, jnp.int32)))
    inverse_rms = lax.rsqrt(squares / (n * model) + norm_eps)

    def affine(column, which):
        bias = gather(base, own, column, mask=jnp.full(column.shape, True))
        return total(column) * inverse_rms * scale[own, which] + bias

    pre = 1 / (1 + jnp.exp(-affine(lane, 0))) + eps
    post = 2 / (1 + jnp.exp(-affine(n + lane, 1)))
    comb = affine(2 * n + lane[:, None] * n + lane[None], 2)

    channel = jnp.arange(pl.next_power_of_2(model))
    inside = channel < model
    value = jnp.zeros(channel.shape, jnp.float32)
    for j in range(n):
        weight = jnp.sum(jnp.where(lane == j, pre, 0.0))
        value += weight * gather(streams, token, j, channel, mask=inside).astype(jnp.float32)
    value = value * lax.rsqrt(jnp.sum(value * value) / model + norm_eps)
    value = value * gather(gain, own, channel, mask=inside).astype(jnp.float32)
    scatter(entered, token, channel, value=value, mask=inside)

    comb = jnp.exp(comb - jnp.max(comb, axis=1, keepdims=True))
    comb = comb / jnp.sum(comb, axis=1, keepdims=True) + eps
    comb = comb / (jnp.sum(comb, axis=0, keepdims=True) + eps)

    def rows_then_columns(_, m):
        m = m / (jnp.sum(m, axis=1, keepdims=True) + eps)
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    comb = lax.fori_loop(0, iterations - 1, rows_then_columns, comb)
    scatter(post_out, token, lane, value=post, mask=jnp.full(n, True))
    scatter(comb_out, token, lane[:, None], lane[None], value=comb, mask=jnp.full((n, n), True))


def _leave(streams: Any, output: Any, post: Any, comb: Any, out: Any, *, columns: int) -> None:
    """Body: some columns of one token.

    streams [T, N, M]; output [T, M]; post [T, N]; comb [T, N, N]; out [T, N, M].
    """
    token = pl.program_id(1)
    _, n, model = streams.shape
    channel = pl.program_id(0) * columns + jnp.arange(columns)
    inside = channel < model
    added = gather(output, token, channel, mask=inside).astype(jnp.float32)
    old = [gather(streams, token, j, channel, mask=inside).astype(jnp.float32) for j in range(n)]
    for k in range(n):
        value = post[token, k] * added
        for j in range(n):
            value += comb[token, j, k] * old[j]
        scatter(out, token, k, channel, value=value, mask=inside)
