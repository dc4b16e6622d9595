"""Where a step's time goes on a device: kernels by the part of the model they belong to.

    python -m benchmarks.step_trace --verify 1 64 256 --draft 64 -- --model DIR --speculative-config '{...}'

Takes the server's flags after a lone `--`, builds what the server would build, runs each program under JAX's
profiler, and prints per part the kernels' time, their number, and what share of the step no kernel ran.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from benchmarks.result import Result, markdown_table
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.dummy_step import dummy_plan, pretend
from dspark_jax.serving.executor import Executor
from dspark_jax.serving.serve import limit_gpu_memory

# Scopes of the code that a line of the table is made for; the last one in an operation's path counts.
_SCOPE = re.compile(
    r"(attention_\w+|experts|final_norm|verify|commit|allocate|draft_context|draft_stage_\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where a step's time goes on a device."""

    verify: tuple[int, ...] = (1, 64, 256)
    """Tokens of the verifying programs to trace."""
    draft: tuple[int, ...] = (1, 64)
    """Requests of the drafting programs to trace."""
    context_len: int = 254
    """Cached tokens of every request."""
    repeats: int = 3
    """Runs of each under the profiler."""
    kernels: int = 12
    """Single kernels to list for each program."""
    output: Path | None = None
    """Write the result as JSON here."""
    server_args: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """The server's flags: what follows a lone `--`."""


@dataclass(frozen=True)
class Kernel:
    """One run of one kernel: when, for how long, in ns, and the path of the operation it comes from."""

    name: str
    path: str
    start: float
    duration: float


def read_kernels(folder: Path) -> list[Kernel]:
    """All kernels of the devices in a profile written by `jax.profiler`."""
    (file,) = folder.rglob("*.xplane.pb")
    kernels = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {str(key): str(value) for key, value in event.stats}
                # Kernels within a command buffer come without the path of their operation.
                path = stats.get("name", "")
                kernels.append(Kernel(event.name, path, event.start_ns, event.duration_ns))
    return kernels


def part_of(kernel: Kernel) -> str:
    """The innermost scope of the kernel's operation."""
    found = [name for name in kernel.path.split("/") if _SCOPE.fullmatch(name)]
    return re.sub(r"draft_stage_\d+", "draft_stage", found[-1]) if found else "(other)"


def busy_ns(kernels: list[Kernel]) -> float:
    """Time in which at least one kernel ran."""
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        end = kernel.start + kernel.duration
        busy += max(end - max(kernel.start, until), 0.0)
        until = max(until, end)
    return busy


def idle_gaps(kernels: list[Kernel], runs: int) -> list[tuple[str, str, float, float]]:
    """Between which kernels the device waits: names before and after, ms per run, and how often, dearest first.

    Waiting between two runs is left out: the longest `runs` - 1 gaps.
    """
    gaps, until, before = [], None, ""
    for kernel in sorted(kernels, key=lambda k: k.start):
        if until is not None and kernel.start > until:
            gaps.append((kernel.start - until, before, kernel.name))
        if until is None or kernel.start + kernel.duration > until:
            until, before = kernel.start + kernel.duration, kernel.name
    table: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for gap, *names in sorted(gaps, reverse=True)[runs - 1 :]:
        table[names[0], names[1]][0] += gap / 1e6 / runs
        table[names[0], names[1]][1] += 1 / runs
    return [(*names, *found) for names, found in sorted(table.items(), key=_dearest)]


def trace(executor: Executor, options: Options, tokens: int, *, drafts: bool) -> dict[str, Any]:
    """One program: step time without the profiler, and the kernels under it."""

    def run() -> tuple[float, float]:
        pretend(executor, options.context_len)
        jax.block_until_ready(executor.state)
        started = time.perf_counter()
        rows = min(-(-tokens // (executor.draft_len + 1)), executor.num_slots)
        if drafts:
            executor.dispatch_draft(dummy_plan(executor, tokens, tokens))
        else:
            executor.dispatch(dummy_plan(executor, tokens, rows))
        launched = time.perf_counter()
        jax.block_until_ready(executor.state)
        return time.perf_counter() - started, launched - started

    times = [run() for _ in range(options.repeats + 1)]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(options.repeats):
                run()
        kernels = read_kernels(Path(folder))
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    single: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        for table, key in ((parts, part_of(kernel)), (single, (part_of(kernel), kernel.name))):
            table[key][0] += kernel.duration / 1e6 / options.repeats
            table[key][1] += 1 / options.repeats
    step_s, launch_s = min(times[1:])
    return {
        "program": "draft" if drafts else "verify",
        "size": tokens,
        "step_ms": 1e3 * step_s,
        "launch_ms": 1e3 * launch_s,
        "busy_ms": busy_ns(kernels) / 1e6 / options.repeats,
        "kernels": len(kernels) / options.repeats,
        "parts": {k: [round(v[0], 4), v[1]] for k, v in sorted(parts.items(), key=_dearest)},
        "single": [
            [*k, round(v[0], 4), v[1]]
            for k, v in sorted(single.items(), key=_dearest)[: options.kernels]
        ],
        "gaps": [
            [before, after, round(ms, 4), count]
            for before, after, ms, count in idle_gaps(kernels, options.repeats)[: options.kernels]
        ],
    }


def _dearest(item: tuple[Any, list[float]]) -> float:
    return -item[1][0]


def main(argv: list[str] | None = None) -> int:
    """Trace, print, write; the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    at = args.index("--") if "--" in args else len(args)
    options = tyro.cli(Options, args=args[:at])
    config = parse_flags(args[at + 1 :])
    limit_gpu_memory(config)
    executor = Executor.from_config(config)
    executor.warm_up()
    rows = []
    for drafts, sizes in ((False, options.verify), (True, options.draft)):
        for tokens in sizes:
            row = trace(executor, options, tokens, drafts=drafts)
            rows.append(row)
            print(
                f"\n{row['program']} {row['size']}: step {row['step_ms']:.2f} ms, "
                f"launch {row['launch_ms']:.2f} ms, "
                f"busy {row['busy_ms']:.2f} ms, {row['kernels']:.0f} kernels"
            )
            table = [{"part": k, "ms": v[0], "kernels": v[1]} for k, v in row["parts"].items()]
            print(markdown_table(table))
            names = ("part", "kernel", "ms", "runs")
            print(markdown_table([dict(zip(names, line)) for line in row["single"]]))
            names = ("idle behind", "before", "ms", "times")
            print(markdown_table([dict(zip(names, line)) for line in row["gaps"]]), flush=True)
    if options.output is not None:
        Result(
            name="step_trace",
            promise="every part of a step is accounted for",
            is_kept=all(row["kernels"] for row in rows),
            rows=by_part(rows),
            notes=("Milliseconds; a part's are those of its kernels.",),
            options=options,
        ).finish(options.output)
    return 0


def by_part(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per traced program with a column for every part, the dearest first."""
    dearest: dict[str, float] = defaultdict(float)
    for row in rows:
        for part, (ms, _) in row["parts"].items():
            dearest[part] = max(dearest[part], ms)
    parts = sorted(dearest, key=lambda part: -dearest[part])
    return [
        {
            "program": row["program"],
            "size": row["size"],
            "step": row["step_ms"],
            "kernels run": row["busy_ms"],
            **{part: row["parts"].get(part, [None])[0] for part in parts},
        }
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
