"""Timing of kernels on one GPU: repetitions inside one compiled program, and the two ceilings of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TARGET_MS = 15.0
"""How long one timed program should run: long against the call, short against the session."""

CALLS = 8
"""Calls per turn of the loop of what is short: XLA launches a body of fewer than five kernels one by one, and the
host takes 4 us for each; a longer body becomes one command buffer."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches: a device-to-device copy, read plus written bytes, and a bf16 matrix product."""

    bytes_per_s: float
    flops: float


class Repeated(NamedTuple):
    """A compiled program that runs something `repeats` times."""

    program: Callable[[Any], Any]
    repeats: int

    def time_ms(self, arguments: Any) -> float:
        """Median time of one repetition in ms, over five runs after one that warms up."""
        jax.block_until_ready(self.program(arguments))
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(self.program(arguments))
            times.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(times) / self.repeats


def repeats_for(expected_ms: float) -> int:
    """How often to run what takes `expected_ms`, for a timed program of about TARGET_MS."""
    return int(min(400, max(8, TARGET_MS / max(expected_ms, 1e-3))))


def repeat(run: Callable[[Any, jax.Array], Any], arguments: Any, expected_ms: float) -> Repeated:
    """`run(arguments, i)` for many i as one compiled program. May be called from several threads at once.

    `run` must depend on i, or the compiler hoists it out of the loop: pass a layer `i % layers`, which also keeps
    the level-two cache cold.
    """
    calls = CALLS if expected_ms < 0.1 else 1
    turns = -(-repeats_for(expected_ms) // calls)
    like = jax.eval_shape(run, arguments, jnp.int32(0))

    @jax.jit
    def program(arguments):
        def turn(i, _):
            return tuple(run(arguments, i * calls + call) for call in range(calls))

        start = (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),) * calls
        return lax.fori_loop(0, turns, turn, start)

    return Repeated(program.lower(arguments).compile(), turns * calls)


def time_ms(run: Callable[[Any, jax.Array], Any], arguments: Any, expected_ms: float) -> float:
    """Median device time of one `run(arguments, i)` in ms; see `repeat`."""
    return repeat(run, arguments, expected_ms).time_ms(arguments)


def time_torch_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of one call of a PyTorch function in ms, by events around `repeats` calls."""
    import torch

    run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return statistics.median(times)


def time_captured_ms(run: Callable[[int], Any], expected_ms: float) -> float:
    """Median time in ms of one of the PyTorch calls `run(i)`, many of them captured in one CUDA graph.

    The counterpart of `time_ms`: no launch gaps, and as i chooses other inputs, a cold level-two cache.
    RuntimeError where the calls cannot be captured.
    """
    import torch

    repeats = repeats_for(expected_ms)
    for i in range(3):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process, JAX's for one, must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(repeats):
            run(i)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The first replay keeps the GPU busy until the second, which is timed, has been launched.
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return statistics.median(times)


def torch_on_gpu() -> Any:
    """The torch module if it is installed and sees a GPU, else None."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return torch if torch.cuda.is_available() else None


def measure_ceilings(size: int = 8192, copy_bytes: int = 2**30) -> Ceilings:
    """Ceilings of the first device, measured now."""
    key = jax.random.key(0)
    a = jax.random.normal(key, (2, size, size), jnp.bfloat16)
    product_ms = time_ms(lambda a, i: a[0] @ (a[1] + i.astype(a.dtype)), a, 1.5)
    torch = torch_on_gpu()
    if torch is not None:
        source = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copy_ms = time_torch_ms(lambda: target.copy_(source))
    else:
        x = jnp.zeros(copy_bytes // 4, jnp.int32)
        copy_ms = time_ms(lambda x, i: x + i, x, 0.6)
    return Ceilings(2 * copy_bytes / copy_ms * 1e3, 2 * size**3 / product_ms * 1e3)
