"""What a peer is to the benchmark: calls to time, and a check that they do the work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_timing import time_captured_ms, time_torch_ms


@dataclass(frozen=True)
class PeerCall:
    """A peer with its arguments.

    `run(i)` is timed; i picks one of several sets of inputs, so that the level-two cache stays cold. `check` gives
    the error of one call against float32 arithmetic, relative to the largest expected value, at most `limit`.
    """

    run: Callable[[int], Any]
    check: Callable[[], float]
    limit: float
    expected_ms: float


class PeerCase(NamedTuple):
    """One time to take: for which case of which of our kernels, under which name. `build` makes the arguments."""

    kernel: str
    case: str
    name: str
    build: Callable[[], PeerCall]


def measure(case: PeerCase) -> dict[str, Any]:
    """The case's name and its time in ms, or its failure in one line: the other peers must still run."""
    result: dict[str, Any] = {"kernel": case.kernel, "case": case.case, "name": case.name}
    try:
        torch.cuda.empty_cache()
        call = case.build()
        error = call.check()
        if not error <= call.limit:
            raise AssertionError(f"error {error:.3g} exceeds {call.limit:.3g}")
        return result | _time(case.name, call) | {"error": error}
    except Exception as failure:
        return result | {"failure": " ".join(f"{type(failure).__name__}: {failure}".split())[:300]}


def _time(name: str, call: PeerCall) -> dict[str, Any]:
    """Time in ms of one call in a captured graph; the name says so where that is impossible.

    Times with launch gaps are no match for ours, and the targets, which go by the plain name, pass over them.
    """
    try:
        return {"ms": time_captured_ms(call.run, call.expected_ms)}
    except RuntimeError as failure:
        reason = " ".join(str(failure).split())[:200]
    torch.cuda.synchronize()
    numbers = itertools.count()
    ms = time_torch_ms(lambda: call.run(next(numbers)))
    return {"name": f"{name}, not captured", "ms": ms, "not_captured": reason}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinite where either is not finite."""
    actual, expected = actual.double(), expected.double()
    if not (torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def some(count: int) -> torch.Tensor:
    """Up to four numbers below `count`, the first and the last among them: the rows that are checked."""
    return torch.linspace(0, count - 1, min(count, 4)).long()
