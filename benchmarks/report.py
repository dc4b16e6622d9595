"""Fill the tables of docs/performance.md from the JSON files in benchmarks/results.

    python -m benchmarks.report
    python -m benchmarks.report --check      # change nothing, exit status 1 when the page is not up to date

A table stands between `<!-- result: FILE -->` and `<!-- end -->`; what is there is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.flash_report import draw_pictures, flash_tables
from benchmarks.peer_times import with_ratios
from benchmarks.result import markdown_table
from dspark_jax.serving.bench.report import sweep_table

_ROOT = Path(__file__).parents[1]
_SLOT = re.compile(r"(<!-- result: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Fill the tables of docs/performance.md from the JSON files in benchmarks/results."""

    page: Path = _ROOT / "docs" / "performance.md"
    """Page with the tables."""
    results: Path = _ROOT / "benchmarks" / "results"
    """Folder of the JSON files."""
    check: bool = False
    """Change nothing; exit status 1 when the page is not up to date."""


def fill(page: str, results: Path) -> str:
    """The page with every table made anew from its file, or a line that says there is none yet."""

    def table(match: re.Match[str]) -> str:
        path = results / match[2]
        body = render(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"{match[1]}\n{body}\n{match[3]}"

    return _SLOT.sub(table, page)


def render(data: Mapping[str, Any]) -> str:
    """One result as Markdown: of these benchmarks, of `benchmarks.kernels`, `bench sweep` or the large sweep."""
    if "points" in data:
        return _sweep(data)
    if "flash_points" in data:
        return flash_tables(data)
    if "bytes_per_s" in data:
        return _kernels(data)
    verdict = "Kept" if data["is_kept"] else "**Broken**"
    lines = [
        markdown_table(data["rows"]),
        f"{verdict}: {data['promise']}.",
        *data["notes"],
        f"{_environment(data['environment'])}, {data['date']}.",
    ]
    return "\n".join(lines) + "\n"


def _sweep(data: Mapping[str, Any]) -> str:
    """The table of a sweep, and how its adaptive arm does beside the best other one."""
    summaries = {(p["arm"], p["concurrency"]): p["summary"] for p in data["points"]}
    rates = {key: summary["output_throughput"] for key, summary in summaries.items()}
    lines = [sweep_table(summaries)]
    for concurrency in sorted({concurrency for _, concurrency in rates}):
        others = {a: r for (a, c), r in rates.items() if c == concurrency and a != "adaptive"}
        if ("adaptive", concurrency) in rates and others:
            best = max(others, key=lambda arm: others[arm])
            ratio = rates["adaptive", concurrency] / others[best]
            lines.append(
                f"- Adaptive at concurrency {concurrency}: {ratio:.3f} of the best other arm, {best}."
            )
    environment = data["environment"]
    device = ", ".join(environment["gpus"]) or environment["platform"]
    lines.append(f"\n{device}, Python {environment['python']}, jax {environment['jax']}.")
    return "\n".join(lines) + "\n"


def _kernels(data: Mapping[str, Any]) -> str:
    """Times of kernels beside the ceilings of the same run and other implementations, and what targets it met."""
    rows = [
        {
            "kernel": result["kernel"],
            "case": result["case"],
            "ms": result["ms"],
            "TB/s": result["bytes_per_s"] / 1e12,
            "of copy": f"{result['bytes_per_s'] / data['bytes_per_s']:.0%}",
            "TFLOP/s": result["flops"] / 1e12,
            "of product": f"{result['flops'] / data['flops']:.0%}",
            "others, ms (over ours)": with_ratios(result["peers_ms"], result["ms"]),
        }
        for result in data["results"]
        if "ms" in result
    ]
    measured = f", {data['date']}" if "date" in data else ""
    targets = f"\n{markdown_table(data['targets'])}" if "targets" in data else ""
    return (
        f"{markdown_table(rows)}{targets}\nCeilings of the same run: a copy moves "
        f"{data['bytes_per_s'] / 1e12:.2f} TB/s, a bfloat16 product {data['flops'] / 1e12:.0f} TFLOP/s. "
        f"{data['device']}, jax {data['jax']}{measured}.\n"
    )


def _environment(environment: Mapping[str, Any]) -> str:
    versions = [f"{name} {environment[name]}" for name in ("jax", "torch") if environment[name]]
    return (
        f"{environment['processor']}, {environment['cores']} cores, Python {environment['python']}, "
        f"{', '.join(versions)}, load average {environment['load_average_1min']:.1f} at the end"
    )


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check the page; the exit status."""
    options = tyro.cli(ReportOptions, args=argv)
    old = options.page.read_text()
    new = fill(old, options.results)
    if options.check:
        if new != old:
            print(f"{options.page} is not up to date: python -m benchmarks.report", file=sys.stderr)
        return int(new != old)
    options.page.write_text(new)
    flash = options.results / "flash_sweep.json"
    if flash.exists():
        for path in draw_pictures(json.loads(flash.read_text()), options.page.parent / "pictures"):
            print(f"wrote {path}")
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
