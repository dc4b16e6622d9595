"""From starting the process to the first token: cold, with an empty cache folder, and warm.

python -m benchmarks.startup --output benchmarks/results/startup.json
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.prompts import bundled_prompts
from benchmarks.result import Result
from benchmarks.server import SpeculativeOptions, run_benchmark, serving


@dataclass(frozen=True, kw_only=True)
class StartupOptions(SpeculativeOptions):
    """From starting the process to the first token: cold, with an empty cache folder, and warm."""

    warm_starts: int = 3
    """Starts with a filled cache; the median counts."""
    max_cold_s: float = 120.0
    """Promised for the cold start."""
    max_warm_s: float = 20.0
    """Promised for a warm start."""


async def start_once(options: StartupOptions, cache: Path) -> tuple[float, float]:
    """Seconds until the server is healthy and until it has sent a first token, from one start."""
    here = dataclasses.replace(options, compilation_cache_dir=cache)
    [prompt] = bundled_prompts(1)
    start_s = time.perf_counter()
    async with serving(here, options.speculation) as server:
        healthy_s = time.perf_counter() - start_s
        first_token_s = await server.first_token_s(prompt, max_tokens=1)
    return healthy_s, healthy_s + first_token_s


async def measure(options: StartupOptions) -> int:
    """Start cold, then warm; the exit status."""
    # JAX's own cache would turn the cold start into a half-warm one.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory(prefix="dspark-startup-") as folder:
        cache = Path(folder)
        starts = [await start_once(options, cache) for _ in range(1 + options.warm_starts)]
        cache_mib = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) / 2**20
    rows = [
        {"start": "cold" if i == 0 else f"warm {i}", "healthy, s": healthy, "first token, s": first}
        for i, (healthy, first) in enumerate(starts)
    ]
    cold_s, *warm_s = (first for _, first in starts)
    return Result(
        name="startup",
        promise=(
            f"first token within {options.max_cold_s:g} s of a cold start, "
            f"{options.max_warm_s:g} s of a warm one"
        ),
        is_kept=cold_s <= options.max_cold_s and statistics.median(warm_s) <= options.max_warm_s,
        rows=rows,
        notes=(f"The cache holds {cache_mib:.0f} MiB.",),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(measure(tyro.cli(StartupOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
