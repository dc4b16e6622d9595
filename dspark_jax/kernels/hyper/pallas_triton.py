"""Triton kernels of `hyper_enter` (two: projection, then mixing) and `hyper_leave` (one).

The projection to (2+N)N values reads all streams of a token; few tokens are spread over the multiprocessors by
cutting the sum into splits. Programs of the second kernel do one of two things: balance the N x N matrices of a
block of tokens, or sum the streams of one token. A matrix takes 2 * iterations dependent steps, longer than a
token's sum, so the two run side by side.

The projection takes the tokens from the last to the first, the other kernels from the first to the last: each
begins with what the one before it has left in the level-two cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.triton import dot, gather, scatter, triton_call
from dspark_jax.kernels.weight_tile import power_of_two_factor


@dataclass(frozen=True)
class Tile:
    """Projection: `tokens` by `depth` input columns per step, the sum in `splits` parts, `warps`, `stages`.

    Mixing: matrices of `balance` tokens in one program, `mix_warps`.
    """

    tokens: int
    depth: int
    splits: int
    warps: int
    stages: int
    balance: int
    mix_warps: int


@dataclass(frozen=True)
class LeaveTile:
    """`columns` channels of one token in one program."""

    columns: int
    warps: int


def default_tile(*, tokens: int, inner: int, capability: int) -> Tile:
    """Tile for `tokens` tokens of `inner` = N*M values. The same on every supported GPU.

    Blocks of tokens read the projection's weights, and cut them into two terms, once each: so they are large
    as soon as the splits, of at least one step, still give about two programs per multiprocessor.
    """
    del capability
    block = 16 if tokens < 128 else 64
    depth = power_of_two_factor(inner, 256 if block == 16 else 128)
    wanted = max(1, min(64, 264 // pl.cdiv(tokens, block)))
    # Splits divide the number of steps.
    splits = power_of_two_factor(inner // depth * 16, 16 * wanted) // 16
    return Tile(
        tokens=block,
        depth=depth,
        splits=splits,
        warps=4,
        stages=3,
        balance=max(8, min(64, 512 // splits)),
        mix_warps=4,
    )


def default_leave_tile(*, model: int) -> LeaveTile:
    """Tile for `model` channels."""
    return LeaveTile(columns=min(512, pl.next_power_of_2(model)), warps=2)


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
    num_blocks = pl.cdiv(tokens, tile.balance)
    return triton_call(
        partial(
            _mix,
            balance=tile.balance,
            num_blocks=num_blocks,
            iterations=iterations,
            eps=eps,
            norm_eps=norm_eps,
        ),
        layer,
        sums,
        streams,
        base,
        scale,
        gain,
        grid=(num_blocks + tokens,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, model), streams.dtype),
            jax.ShapeDtypeStruct((tokens, n), jnp.float32),
            jax.ShapeDtypeStruct((tokens, n, n), jnp.float32),
        ),
        name="hyper_mix",
        dispatch=dispatch,
        num_warps=tile.mix_warps,
    )


def hyper_leave_pallas(
    streams, output, post, comb, *, dispatch: Dispatch, tile: LeaveTile | None = None
) -> jax.Array:
    """See `hyper_leave`; `tile` overrides the default sizes."""
    tokens, _, model = streams.shape
    tile = tile or default_leave_tile(model=model)
    return triton_call(
        partial(_leave, columns=tile.columns),
        streams,
        output,
        post,
        comb,
        grid=(pl.cdiv(model, tile.columns), tokens),
        out_shape=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        name="hyper_leave",
        dispatch=dispatch,
        num_warps=tile.warps,
    )


def _project(layer: Any, streams: Any, w_fn: Any, sums: Any, *, tile: Tile) -> None:
    """Body: one split of one block of tokens.

    layer [1]; streams [T, N*M]; w_fn [L, (2+N)N, N*M]; out sums [splits, T, columns].
    """
    split, last = pl.program_id(0), pl.num_programs(1) - 1
    tokens, inner = streams.shape
    outputs, columns = w_fn.shape[1], sums.shape[2]
    token = (last - pl.program_id(1)) * tile.tokens + jnp.arange(tile.tokens)
    is_token = token < tokens
    column = jnp.arange(columns)
    steps = inner // tile.depth // tile.splits

    def step(i, carry):
        total, squares = carry
        k = (split * steps + i) * tile.depth + jnp.arange(tile.depth)
        x = gather(streams, token[:, None], k[None], mask=is_token[:, None])
        w = gather(w_fn, layer[0], column[:, None], k[None], mask=(column < outputs)[:, None])
        wide = x.astype(jnp.float32)
        # Summed over the columns after the last step, because that takes shuffles.
        squares = squares + wide * wide
        if x.dtype == jnp.float32:
            return total + dot(x, w, transpose_b=True), squares
        high, low = (term.astype(x.dtype) for term in _two_terms(w))
        total = total + dot(x, high, transpose_b=True) + dot(x, low, transpose_b=True)
        return total, squares

    start = tuple(jnp.zeros((tile.tokens, size), jnp.float32) for size in (columns, tile.depth))
    total, squares = lax.fori_loop(0, steps, step, start)
    total = jnp.where((column == columns - 1)[None], jnp.sum(squares, axis=1)[:, None], total)
    scatter(sums, split, token[:, None], column[None], value=total, mask=is_token[:, None])


def _two_terms(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 w as a sum whose first term bfloat16 holds exactly: the products stay exact to 16 bits.

    The term is cut off and not rounded: conversions that are not made in pairs are slow.
    """
    bits = lax.bitcast_convert_type(w, jnp.int32) & -(2**16)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, w - high


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
    balance: int,
    num_blocks: int,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    """Body: one of `num_blocks` blocks of `balance` tokens up to their matrices, or one token's sum.

    layer [1]; sums [splits, T, columns]; streams [T, N, M]; base [L, (2+N)N]; scale [L, 3]; gain [L, M];
    out entered [T, M], post [T, N], comb [T, N, N].
    """
    program = pl.program_id(0)
    tokens, n, model = streams.shape
    lane = jnp.arange(n)
    squares_column = jnp.full(1, sums.shape[2] - 1, jnp.int32)
    read = partial(_read_projections, layer[0], sums, base, scale)
    inverse_rms = partial(_inverse_rms, size=n * model, eps=norm_eps)

    # Each branch reads first whatever it needs: a sum over splits has barriers, which loads do not pass.
    @pl.when(program < num_blocks)
    def _():
        token = program * balance + jnp.arange(balance)
        squares = _read_parts(sums, token, squares_column)
        post, logits = read(token, n + lane, 1), read(token, 2 * n + jnp.arange(n * n), 2)
        factor = inverse_rms(squares)
        is_token = (token < tokens)[:, None]
        gates = 2 / (1 + jnp.exp(-_affine(post, factor)))
        scatter(post_out, token[:, None], lane[None], value=gates, mask=is_token)
        matrix = _sinkhorn(_affine(logits, factor).reshape(balance, n, n), iterations, eps)
        index = token[:, None, None], lane[None, :, None], lane[None, None]
        scatter(comb_out, *index, value=matrix, mask=is_token[..., None])

    @pl.when(program >= num_blocks)
    def _():
        token = program - num_blocks
        channel = jnp.arange(pl.next_power_of_2(model))
        inside = channel < model
        squares = _read_parts(sums, token[None], squares_column)
        gates = read(token[None], lane, 0)
        rows = [gather(streams, token, j, channel, mask=inside) for j in range(n)]
        gains = gather(gain, layer[0], channel, mask=inside)
        pre = 1 / (1 + jnp.exp(-_affine(gates, inverse_rms(squares)))) + eps
        value = jnp.zeros(channel.shape, jnp.float32)
        for j, row in enumerate(rows):
            value += jnp.sum(jnp.where(lane == j, pre, 0.0)) * row.astype(jnp.float32)
        value = value * lax.rsqrt(jnp.sum(value * value) / model + norm_eps)
        scatter(entered, token, channel, value=value * gains.astype(jnp.float32), mask=inside)


class _Projections(NamedTuple):
    """Some columns of some tokens as they were read."""

    parts: jax.Array  # [splits, tokens, columns]
    scale: jax.Array  # []
    bias: jax.Array  # [columns]


def _read_parts(sums: Any, token: jax.Array, column: jax.Array) -> jax.Array:
    """sums [splits, T, columns] of some tokens and columns: [splits, tokens, columns]; 0 beyond the last token."""
    split = jnp.arange(sums.shape[0])[:, None, None]
    token = token[None, :, None]
    return gather(sums, split, token, column[None, None], mask=token < sums.shape[1])


def _read_projections(
    layer: jax.Array,
    sums: Any,
    base: Any,
    scale: Any,
    token: jax.Array,
    column: jax.Array,
    which: int,
) -> _Projections:
    bias = gather(base, layer, column, mask=jnp.full(column.shape, True))
    return _Projections(_read_parts(sums, token, column), scale[layer, which], bias)


def _inverse_rms(squares: jax.Array, *, size: int, eps: float) -> jax.Array:
    """[tokens, 1] of sums of squares of `size` values, [splits, tokens, 1]."""
    return lax.rsqrt(jnp.sum(squares, axis=0) / size + eps)


def _affine(projections: _Projections, inverse_rms: jax.Array) -> jax.Array:
    """Normed, scaled and shifted projections [tokens, columns]."""
    total = jnp.sum(projections.parts, axis=0)
    return total * inverse_rms * projections.scale + projections.bias


def _sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Near doubly stochastic matrices of logits [tokens, N, N]: see `hyper_enter`."""

    def normalised(m: jax.Array, axis: int) -> jax.Array:
        # A reciprocal per row or column: divisions per entry would lengthen every step.
        return m * (1 / (jnp.sum(m, axis=axis, keepdims=True) + eps))

    def rows_then_columns(_, m: jax.Array) -> jax.Array:
        return normalised(normalised(m, 2), 1)

    m = jnp.exp(logits - jnp.max(logits, axis=2, keepdims=True))
    m = normalised(m / jnp.sum(m, axis=2, keepdims=True) + eps, 1)
    return lax.fori_loop(0, iterations - 1, rows_then_columns, m)


def _leave(streams: Any, output: Any, post: Any, comb: Any, out: Any, *, columns: int) -> None:
    """Body: some columns of one token.

    streams [T, N, M]; output [T, M]; post [T, N]; comb [T, N, N]; out [T, N, M].
    """
    token = pl.program_id(1)
    _, n, model = streams.shape
    channel = pl.program_id(0) * columns + jnp.arange(columns)
    inside = channel < model
    added = gather(output, token, channel, mask=inside)
    old = [gather(streams, token, j, channel, mask=inside) for j in range(n)]
    # All weights before the first store: loads do not pass a store, which might write what they read.
    weights = [(post[token, k], [comb[token, j, k] for j in range(n)]) for k in range(n)]
    for k, (of_output, of_streams) in enumerate(weights):
        value = of_output * added.astype(jnp.float32)
        for weight, stream in zip(of_streams, old):
            value += weight * stream.astype(jnp.float32)
        scatter(out, token, k, channel, value=value, mask=inside)
