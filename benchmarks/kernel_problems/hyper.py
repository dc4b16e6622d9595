"""Into and out of a block of hyper-connections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernel_problems.problem import Problem, label, nearest, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels import hyper as hyper_op
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.hyper import cases as hyper_cases
from dspark_jax.kernels.hyper import pallas_triton as hyper


def hyper_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Into and out of a block at Flash and Pro widths."""
    for tokens, model in ((16, 4096), (256, 4096), (2048, 4096), (256, 7168)):
        yield partial(_hyper_enter, tokens, model, dispatch)
        yield partial(_hyper_leave, tokens, model, dispatch)


def _hyper_enter(tokens: int, model: int, dispatch: Dispatch) -> Problem:
    made = hyper_cases.make(hyper_cases.Case("", tokens, model), 7, jnp.bfloat16)
    layers = 8
    stacks = {k: jnp.stack([made[k][1]] * layers) for k in ("w_fn", "base", "scale", "gain")}
    arrays = {"streams": made["streams"]} | stacks
    fixed = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}

    def run(tile, arrays, i):
        return hyper.hyper_enter_pallas(
            **arrays, layer=i % layers, **fixed, dispatch=dispatch, tile=tile
        )

    def reference(arrays, i):
        return hyper_op.hyper_enter_reference(**arrays, layer=i % layers, **fixed)

    def check() -> float:
        outs = jax.jit(partial(run, None))(arrays, jnp.int32(1))
        expected = jax.jit(reference)(arrays, jnp.int32(1))
        return max(relative_error(a, b) for a, b in zip(outs, expected))

    default = hyper.default_tile(tokens=tokens, inner=4 * model, capability=dispatch.capability)
    variants = {}
    # More tokens per tile read the projection's weights less often, and need more splits to fill the device.
    tiles = [
        hyper.Tile(block, depth, splits, warps, stages, balance, mix_warps)
        for block, depth, splits, warps, stages, balance, mix_warps in itertools.product(
            (16, 32, 64, 128),
            (64, 128, 256),
            (4, 8, 16, 32, 64),
            (4, 8),
            (3, 4),
            (8, 16, 32, 64),
            (4, 8),
        )
        if 4 * model % (depth * splits) == 0
        and splits * -(-tokens // block) >= 64
        and splits * balance <= 1024
    ]
    for tile in nearest(tiles, default, most=2):
        variants[label(tile)] = partial(run, tile)
    return Problem(
        kernel="hyper_enter",
        case=f"{tokens}x4x{model}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=2.0 * tokens * 5 * model + 24 * 4 * 4.0 * model,
        flops=2.0 * tokens * 24 * 4 * model,
        expected_ms=max(0.01, tokens * 5e-5),
        tile=default,
        variants=variants,
        peers={"XLA": lambda: time_ms(reference, arrays, 0.1)},
    )


def _hyper_leave(tokens: int, model: int, dispatch: Dispatch) -> Problem:
    case = hyper_cases.Case("", tokens, model)
    made = hyper_cases.make(case, 8, jnp.bfloat16)
    mixed = hyper_op.hyper_enter_reference(**made)
    arrays = (
        made["streams"],
        hyper_cases.make_output(case, 8, jnp.bfloat16),
        jnp.stack([mixed[1]] * 2),
        jnp.stack([mixed[2]] * 2),
    )

    def run(call, arrays, i):
        streams, output, post, comb = arrays
        return call(streams, output, post[i % 2], comb[i % 2])

    def kernel(tile):
        return partial(run, partial(hyper.hyper_leave_pallas, dispatch=dispatch, tile=tile))

    reference = partial(run, hyper_op.hyper_leave_reference)

    def check() -> float:
        return relative_error(
            jax.jit(kernel(None))(arrays, jnp.int32(0)), jax.jit(reference)(arrays, jnp.int32(0))
        )

    default = hyper.default_leave_tile(model=model)
    tiles = [
        hyper.LeaveTile(columns, warps)
        for columns, warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8))
    ]
    return Problem(
        kernel="hyper_leave",
        case=f"{tokens}x4x{model}",
        arguments=arrays,
        run=kernel(None),
        check=check,
        num_bytes=2.0 * tokens * 9 * model,
        flops=2.0 * tokens * 20 * model,
        expected_ms=max(0.01, tokens * 5e-5),
        tile=default,
        variants={label(tile): kernel(tile) for tile in nearest(tiles, default, most=2)},
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )
