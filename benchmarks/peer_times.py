"""Other implementations' times beside our kernels', as the processes of `benchmarks.kernel_peers` take them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KERNELS = ("sparse_mla", "index_topk", "expert_mlp", "linear")
"""Kernels that have peers of that kind."""

Result = dict[str, Any]


def find_result(results: Iterable[Result], kernel: str, case: str) -> Result | None:
    """The measured result of a case, which is named in full or up to the comma after which details stand."""
    for result in results:
        name = result.get("case", "")
        if result["kernel"] == kernel and "ms" in result and (name + ",").startswith(case + ","):
            return result
    return None


def measure_peers(kernel: str, folder: Path, limit_s: float) -> list[Result]:
    """The peers' lines for one of our kernels, as many as came within the time; what went wrong is printed."""
    if not folder.is_dir():
        print(f"peers of {kernel}: no folder {folder}: see benchmarks/peers_pack.sh", flush=True)
        return []
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "peers.jsonl")
        command = [sys.executable, "-m", "benchmarks.kernel_peers", kernel, "--peers", str(folder)]
        command += ["--output", str(output), "--limit-s", str(limit_s)]
        try:
            # One call may still be under way at the limit, for example in nvcc.
            status = subprocess.run(command, timeout=limit_s + 20).returncode
            if status < 0:
                print(f"peers of {kernel}: ended by signal {-status}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"peers of {kernel}: stopped after {limit_s + 20:.0f} s", flush=True)
        return read_lines(output.read_text() if output.exists() else "")


def read_lines(text: str) -> list[Result]:
    """Lines of JSON, without a last one that was not finished."""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def add_times(results: list[Result], times: Iterable[Result]) -> list[str]:
    """Put the times into the results they belong to; what there is to say about each, a line per peer."""
    lines = []
    for time in times:
        where = f"{time['kernel']:<12} {time['case']:<36}"
        if "failure" in time:
            lines.append(f"{where} {time['name']} did not run: {time['failure']}")
            continue
        result = find_result(results, time["kernel"], time["case"])
        if result is None:
            lines.append(f"{where} {time['name']} {time['ms']:.4f} ms, no time of ours")
            continue
        result["peers_ms"][time["name"]] = time["ms"]
        text = with_ratios({time["name"]: time["ms"]}, result["ms"])
        lines.append(f"{where} {result['ms']:8.4f} ms  {text}  error {time['error']:.1e}")
        if "not_captured" in time:
            lines.append(f"{'':<49} not captured: {time['not_captured']}")
    return lines


def with_ratios(peers_ms: Mapping[str, float], ms: float) -> str:
    """Peers' times in ms, each with its ratio to ours: above 1 the peer is slower."""
    return ", ".join(f"{name} {time:.3g} ({time / ms:.2f}x)" for name, time in peers_ms.items())
