"""The linears of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.experts import finite_weight
from benchmarks.kernel_problems.problem import Problem, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.linear import cases as linear_cases
from dspark_jax.kernels.linear import pallas_triton as linear
from dspark_jax.kernels.linear.reference import stacked_linear_reference


def linear_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """All linears of a Flash layer one after the other, read from stacks of layers."""
    for storage, sizes in (("fp8", (1, 16, 64, 256, 512, 1024, 2048)), ("plain", (16, 256, 1024))):
        for tokens in sizes:
            yield partial(_linear, tokens, storage, dispatch)


def _linear(tokens: int, storage: str, dispatch: Dispatch) -> Problem:
    layers = 4
    arrays = {}
    for number, (name, (outputs, inner, groups)) in enumerate(linear_cases.FLASH.items()):
        x_key, w_key = jax.random.split(jax.random.key(number))
        shape = (1, groups * outputs, inner)
        layer = jax.jit(finite_weight, static_argnums=(1, 2))(w_key, shape, storage)
        stack = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * layers), layer)
        arrays[name] = jax.random.normal(x_key, (tokens, groups, inner), jnp.bfloat16), stack

    def tile_of(name: str) -> linear.Tile:
        outputs, inner, groups = linear_cases.FLASH[name]
        return linear.default_tile(
            tokens=tokens,
            outputs=outputs * groups,
            inner=inner,
            bits=16 if storage == "plain" else 8,
            capability=dispatch.capability,
        )

    def run(change, arrays, i):
        return {
            name: linear.stacked_linear_pallas(
                x, stack, layer=i % layers, dispatch=dispatch, tile=change(tile_of(name))
            )
            for name, (x, stack) in arrays.items()
        }

    def expanded(arrays, i):
        return {
            name: stacked_linear_reference(x, stack, layer=i % layers)
            for name, (x, stack) in arrays.items()
        }

    def check() -> float:
        outs = jax.jit(partial(run, lambda tile: tile))(arrays, jnp.int32(1))
        expected = jax.jit(expanded)(arrays, jnp.int32(1))
        return max(relative_error(outs[name], expected[name]) for name in arrays)

    variants = {}
    for sizes in (
        {"columns": 32},
        {"columns": 64},
        {"rows": 16},
        {"rows": 32},
        {"rows": 128, "warps": 8},
        {"rows": 128},
        {"depth": 64},
        {"stages": 2},
        {"stages": 5},
        {"warps": 8},
        {"splits": 1},
        {"splits": 2},
        {"splits": 8},
        {"columns": 64, "splits": 4},
        {"columns": 32, "splits": 4},
    ):
        change = partial(dataclasses.replace, **sizes)
        variants[" ".join(f"{k}={v}" for k, v in sizes.items())] = partial(
            run, lambda tile, change=change: change(tile)
        )
    stacks = [stack for _, stack in arrays.values()]
    weights = sum(int(np.prod(stack.shape[1:])) for stack in stacks)
    return Problem(
        kernel="linear",
        case=f"{storage} {tokens} tokens",
        arguments=arrays,
        run=partial(run, lambda tile: tile),
        check=check,
        num_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(stacks)) / layers,
        flops=2.0 * tokens * weights,
        expected_ms=max(0.1, tokens * weights * 2 / 2.5e11),
        tile=tile_of("w_o_b"),
        variants=variants,
        peers={"expanded, XLA": lambda: time_ms(expanded, arrays, 0.5)},
    )
