"""Routed experts in every storage, and their plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.problem import Problem, label, nearest, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.expert_mlp import cases as expert_cases
from dspark_jax.kernels.expert_mlp import pallas_triton as expert
from dspark_jax.kernels.expert_mlp.plan import make_plan
from dspark_jax.kernels.expert_mlp.reference import expert_mlp_reference
from dspark_jax.kernels.quantized import take
from dspark_jax.kernels.weight_tile import weight_bits


def expert_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Routed experts at Flash sizes in every storage, with uneven routing."""
    for storage, sizes in (
        ("fp4", (8, 64, 256, 512, 768, 1024, 1536, 2048, 8192)),
        ("fp8", (64, 2048)),
        ("plain", (64, 512)),
    ):
        # One stack serves all sizes of a storage; made when the first of them runs.
        stack = _LazyStack(storage)
        for tokens in sizes:
            yield partial(_expert, tokens, storage, stack, dispatch)


@dataclass
class _LazyStack:
    storage: str
    weights: Any = None

    def get(self) -> Any:
        if self.weights is None:
            # More than 4 GiB of one-byte weights, see `triton_call`.
            layers = {"fp4": 5, "fp8": 3, "plain": 2}[self.storage]
            size = expert_cases.FLASH
            up = (1, size["experts"], 2 * size["width"], size["model"])
            down = (1, size["experts"], size["model"], size["width"])
            self.weights = tuple(
                jax.tree.map(
                    lambda x: jnp.concatenate([x] * layers),
                    jax.jit(finite_weight, static_argnums=(1, 2))(
                        jax.random.key(n), shape, self.storage
                    ),
                )
                for n, shape in enumerate((up, down))
            )
        return self.weights


def finite_weight(key: jax.Array, shape: tuple[int, ...], storage: str) -> Any:
    """Random weights of this storage, none of them NaN."""
    return expert_cases.random_weight(key, shape, storage, jnp.bfloat16)


def routing(tokens: int) -> dict[str, jax.Array]:
    """`expert_ids` and `weights`, both [T, k], of the uneven routing that every case of this size has."""
    size = expert_cases.FLASH | {"model": 16, "width": 16}
    made = expert_cases.make(
        expert_cases.Case("", tokens, storage="plain", layers=1, **size), 4, jnp.bfloat16
    )
    return {name: made[name] for name in ("expert_ids", "weights")}


def _expert(tokens: int, storage: str, stack: _LazyStack, dispatch: Dispatch) -> Problem:
    size = expert_cases.FLASH
    w_gate_up, w_down = stack.get()
    layers = w_gate_up.shape[0]
    made = routing(tokens)
    arrays = {
        "x": jax.random.normal(jax.random.key(5), (tokens, size["model"]), jnp.bfloat16),
        "expert_ids": made["expert_ids"],
        "weights": made["weights"],
        "w_gate_up": w_gate_up,
        "w_down": w_down,
    }

    def run(tile, arrays, i):
        return expert.expert_mlp_pallas(
            **arrays, layer=i % layers, limit=10.0, dispatch=dispatch, tile=tile
        )

    def check() -> float:
        some = np.unique(np.linspace(0, tokens - 1, 4).astype(int))
        subset = {k: arrays[k][some] for k in ("x", "expert_ids", "weights")}
        expected = jax.jit(partial(expert_mlp_reference, layer=0, limit=10.0))(
            **subset, w_gate_up=take(w_gate_up, (slice(1, 2),)), w_down=take(w_down, (slice(1, 2),))
        )
        return relative_error(jax.jit(partial(run, None))(arrays, jnp.int32(1))[some], expected)

    default = expert.default_tile(
        assignments=tokens * size["k"],
        experts=size["experts"],
        bits=weight_bits(w_gate_up),
        capability=dispatch.capability,
    )
    variants = {}
    # A tile of fp8 weights is at most 128 columns of the input deep, one of fp4 in quarters at least.
    depths = {"plain": (32, 64, 128), "fp8": (128,), "fp4": (128, 256, 512)}[storage]
    # Whether it is decoded in order -> depths; only fp4 can be.
    ways = {False: depths} | ({True: (64, 128)} if storage == "fp4" else {})
    rows = [r for r in (default.rows // 2, default.rows, 2 * default.rows) if r >= 16]
    tiles = [
        expert.Tile(*sizes, weights_first=default.weights_first, in_order=in_order)
        for in_order, deep in ways.items()
        for sizes in itertools.product(rows, (64, 128, 256), deep, (4, 8), (2, 3, 4, 5))
    ]
    for tile in nearest(tiles, default, most=4):
        variants[label(tile)] = partial(run, tile)
    active = len(np.unique(np.asarray(made["expert_ids"])))
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves((w_gate_up, w_down))) / layers
    flops = 2.0 * tokens * size["k"] * 3 * size["model"] * size["width"]
    peers = {}
    if storage == "plain":
        peers["lax.ragged_dot"] = partial(_ragged_dot_ms, arrays, active)
    return Problem(
        kernel="expert_mlp",
        case=f"{storage} {tokens} tokens, {active} experts",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=weight_bytes * active / size["experts"],
        flops=flops,
        expected_ms=max(0.2, flops / 2e11),
        tile=default,
        variants=variants,
        peers=peers,
    )


def _ragged_dot_ms(arrays: Any, active: int) -> float:
    """Gate-up and down products alone by `lax.ragged_dot`, on the first layer, rows already sorted."""
    ids = arrays["expert_ids"].reshape(-1)
    sizes = jnp.bincount(ids, length=arrays["w_gate_up"].shape[1]).astype(jnp.int32)
    up, down = (jnp.swapaxes(arrays[n][0], 1, 2) for n in ("w_gate_up", "w_down"))
    rows = jnp.repeat(arrays["x"], arrays["expert_ids"].shape[1], axis=0)

    def run(operands, i):
        rows, up, down, sizes = operands
        hidden = jax.lax.ragged_dot(rows + i.astype(rows.dtype), up, sizes)
        return jax.lax.ragged_dot(hidden[:, : down.shape[1]], down, sizes)

    return time_ms(run, (rows, up, down, sizes), 5.0)


def plan_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Sorting and tiling alone."""
    for tokens in (64, 2048):
        yield partial(_plan, tokens, dispatch)


def _plan(tokens: int, dispatch: Dispatch) -> Problem:
    size = expert_cases.FLASH
    ids = jax.random.randint(jax.random.key(6), (tokens, size["k"]), 0, size["experts"])

    def run(ids, i):
        shifted = (ids + i) % size["experts"]
        return tuple(make_plan(shifted, experts=size["experts"], rows=16, dispatch=dispatch))

    def check() -> float:
        order = np.asarray(jax.jit(run)(ids, jnp.int32(0))[0])
        expected = np.argsort(np.asarray(ids).reshape(-1), stable=True)
        return 0.0 if (order == expected).all() else float("inf")

    def argsort() -> float:
        return time_ms(lambda ids, i: jnp.argsort((ids + i).reshape(-1)), ids, 0.05)

    return Problem(
        kernel="expert_plan",
        case=f"{tokens} tokens",
        arguments=ids,
        run=run,
        check=check,
        num_bytes=4.0 * ids.size,
        flops=0.0,
        expected_ms=0.02,
        peers={"jnp.argsort": argsort},
    )
