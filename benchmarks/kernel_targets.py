"""The kernels' targets as data, and which of them a run of `benchmarks.kernels` meets.

Left out, since no case of that benchmark shows them: the launch gaps of a whole step (`benchmarks.step_trace`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.peer_times import Result, find_result


class Run(NamedTuple):
    """Results of one run with the ceilings measured in it."""

    results: Sequence[Result]
    bytes_per_s: float
    flops: float


class Figure(NamedTuple):
    """A figure of one case: its name, and how it follows from a run, None where something it needs is missing."""

    name: str
    of: Callable[[Run, Result], float | None]


class Target(NamedTuple):
    """What `figure` of a case shall reach, or with `is_limit` not exceed."""

    kernel: str
    case: str
    figure: Figure
    threshold: float
    is_limit: bool = False


def times(peer: str, at: str | None = None) -> Figure:
    """A peer's time over ours; `at` names another case of the kernel if it stands there."""

    def of(run: Run, result: Result) -> float | None:
        timed = result if at is None else find_result(run.results, result["kernel"], at)
        ms = None if timed is None else timed["peers_ms"].get(peer)
        return None if ms is None else ms / result["ms"]

    return Figure(f"{peer} / ours", of)


COPY = Figure("of copy", lambda run, result: result["bytes_per_s"] / run.bytes_per_s)
"""Bytes moved, as a share of what a copy moves."""
PRODUCT = Figure("of product", lambda run, result: result["flops"] / run.flops)
"""Useful operations, as a share of what a bfloat16 product reaches."""


def without(kernel: str, case: str) -> Figure:
    """As PRODUCT, for the time that is left without another case's."""

    def of(run: Run, result: Result) -> float | None:
        other = find_result(run.results, kernel, case)
        if other is None or other["ms"] >= result["ms"]:
            return None
        return result["flops"] / run.flops * result["ms"] / (result["ms"] - other["ms"])

    return Figure(f"of product, without {kernel}", of)


def share_of(kernel: str, case: str) -> Figure:
    """Our time over another case's."""

    def of(run: Run, result: Result) -> float | None:
        other = find_result(run.results, kernel, case)
        return None if other is None else result["ms"] / other["ms"]

    return Figure(f"of {kernel} {case}", of)


def _targets() -> Iterator[Target]:
    for tokens in (16, 64, 256, 1024, 2048):
        case = f"flash decode_{tokens}"
        decode = times("FlashMLA fp8 decode")
        yield Target("sparse_mla", case, decode, 1.0 if tokens <= 64 else 0.9)
        sparse = times("FlashMLA bf16 sparse forward")
        yield Target("sparse_mla", case, sparse, 1.0 if tokens == 16 else 0.65)
    for tokens in (16, 64, 256, 2048):
        case = f"flash decode_{tokens}"
        decode = times("FlashMLA fp8 decode", at=case)
        yield Target("sparse_mla", f"{case} fp8 rows", decode, 0.9 if tokens <= 64 else 0.65)
    for name in ("decode_64x2048", "decode_512x2048", "prefill_2048x2048"):
        yield Target("index_topk", f"{name} bfloat16", times(_SCORES_TOPK), 0.9)
    for name in ("prefill_2048x8192", "prefill_512x32768"):
        yield Target("index_topk", f"{name} bfloat16", times(_SCORES_TOPK), 0.9)
    for entries in (2048, 8192):
        alone = without("select", f"512 of 2048x{entries}")
        yield Target("index_topk", f"prefill_2048x{entries} bfloat16", alone, 0.5)
    for size in ("512x32768", "2048x2048", "2048x8192"):
        yield Target("select", f"512 of {size}", times("lax.top_k"), 5.0)
        yield Target("select", f"512 of {size}", times("torch.topk"), 2.0)
    yield Target("expert_mlp", "fp4 8 tokens", COPY, 0.5)
    yield Target("expert_mlp", "fp4 64 tokens", COPY, 0.6)
    yield Target("expert_mlp", "fp4 256 tokens", COPY, 0.6)
    yield Target("expert_mlp", "fp8 64 tokens", COPY, 0.8)
    yield Target("expert_mlp", "fp4 2048 tokens", PRODUCT, 0.35)
    yield Target("expert_mlp", "fp4 8192 tokens", PRODUCT, 0.45)
    for size in ("256x4x4096", "2048x4x4096", "256x4x7168"):
        yield Target("hyper_enter", size, COPY, 0.6)
        yield Target("hyper_leave", size, COPY, 0.6)
    for tokens in (64, 1024):
        attention = share_of("sparse_mla", f"flash decode_{tokens}")
        yield Target("compress", f"csa decode_{tokens}", attention, 0.05, is_limit=True)


_SCORES_TOPK = "DeepGEMM fp8 scores + torch.topk"
TARGETS = tuple(_targets())


def target_rows(data: Mapping[str, Any], targets: Sequence[Target] = TARGETS) -> list[Result]:
    """A row per target of the kernels in one run: what it asks, the figure, and whether that is met."""
    run = Run(data["results"], data["bytes_per_s"], data["flops"])
    kernels = {result["kernel"] for result in run.results}
    return [_row(run, target) for target in targets if target.kernel in kernels]


def _row(run: Run, target: Target) -> Result:
    result = find_result(run.results, target.kernel, target.case)
    figure = None if result is None else target.figure.of(run, result)
    if figure is None:
        verdict = "not run" if result is None else "nothing to compare with"
    else:
        is_met = figure <= target.threshold if target.is_limit else figure >= target.threshold
        verdict = "met" if is_met else "not met"
    return {
        "kernel": target.kernel,
        "case": target.case,
        "what": target.figure.name,
        "target": f"{'at most' if target.is_limit else 'at least'} {target.threshold:g}",
        "figure": None if figure is None else round(figure, 3),
        "verdict": verdict,
    }
