"""The budget over all pending drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.problem import Problem
from benchmarks.kernel_timing import time_torch_ms, torch_on_gpu
from dspark_jax.decode.allocate import allocate
from dspark_jax.kernels.dispatch import Dispatch


def allocate_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """The budget over all pending drafts: XLA on every device, no kernel of ours."""
    del dispatch
    for rows in (16, 256):
        yield partial(_allocate, rows, 7)


def _allocate(rows: int, drafts: int) -> Problem:
    confidences = jax.random.uniform(jax.random.key(11), (rows, drafts))
    caps = jnp.full(rows, drafts, jnp.int32)
    total = rows * drafts

    def run(arrays, i):
        confidences, caps = arrays
        return allocate(confidences, caps, total // 2 + i % 2)

    def check() -> float:
        lens = np.asarray(jax.jit(run)((confidences, caps), jnp.int32(0)))
        survival = np.cumprod(np.asarray(confidences), axis=1)
        expected = (survival >= np.sort(survival.ravel())[-(total // 2)]).sum(axis=1)
        return 0.0 if (lens == expected).all() else float("inf")

    peers: dict[str, Callable[[], float]] = {}
    torch = torch_on_gpu()
    if torch is not None:
        peers["torch.compile"] = partial(_torch_allocate_ms, torch, confidences, total // 2)
    return Problem(
        kernel="allocate",
        case=f"{rows} requests of {drafts}",
        arguments=(confidences, caps),
        run=run,
        check=check,
        num_bytes=8.0 * total,
        flops=0.0,
        expected_ms=0.05,
        peers=peers,
    )


def _torch_allocate_ms(torch: Any, confidences: jax.Array, budget: int) -> float:
    rows, drafts = confidences.shape
    given = torch.tensor(np.asarray(confidences), device="cuda")
    caps = torch.full((rows,), drafts, device="cuda")

    @torch.compile(mode="reduce-overhead")
    def admitted(given: Any, caps: Any) -> Any:
        survival = torch.cumprod(given.clamp(0, 1), dim=1)
        closed = torch.arange(drafts, device="cuda") >= caps[:, None]
        order = torch.argsort(
            survival.masked_fill(closed, -1.0).T.reshape(-1), descending=True, stable=True
        )
        rank = torch.empty_like(order)
        rank[order] = torch.arange(rows * drafts, device="cuda")
        return ((budget > rank.reshape(drafts, rows).T) & ~closed).sum(dim=1)

    return time_torch_ms(lambda: admitted(given, caps))
