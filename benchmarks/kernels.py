"""Time the Triton kernels on one GPU, beside the device's ceilings and other implementations.

    python -m benchmarks.kernels [--only sparse_mla expert_mlp] [--tune [2048 ...]] [--limit-s 460] [--peers DIR]

Each case is first compared with its reference; a case that fails is reported, and the rest still runs. `--tune`
also times other tile sizes and prints the best: they are compiled on all cores, as far as `--tune-s` seconds per
case go. `--peers` names a folder with the binaries of FlashMLA and DeepGEMM (`benchmarks/peers_pack.sh`): their
times are taken right after ours and shown with ratios, above 1 where ours is faster; one that fails is reported in
a line. At the end stand the targets and which of them are met. Results go to `kernels.json` in $OUT or the working
directory (`--output` names another file), written after every case, so that a run which is cut off leaves what it
found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

# The table's memory is needed by other frameworks too: take it as it is used.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Calls that are timed together must not run side by side.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_command_buffer_scheduling_mode=SERIALIZE"
)

import jax

from benchmarks.kernel_problems import PROBLEMS, Problem, label
from benchmarks.kernel_targets import target_rows
from benchmarks.kernel_timing import Ceilings, measure_ceilings, repeat, time_ms
from benchmarks.peer_times import KERNELS, add_times, measure_peers, with_ratios
from benchmarks.result import markdown_table
from dspark_jax.kernels.dispatch import Backend, default_dispatch


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is the number of cases that failed."""
    parser = argparse.ArgumentParser(description="Time the Triton kernels.")
    parser.add_argument("--only", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument(
        "--tune",
        nargs="*",
        metavar="TEXT",
        help="time other tile sizes too, of cases whose name has one of these texts",
    )
    parser.add_argument("--tune-s", type=float, default=30.0, help="seconds of tuning per case")
    parser.add_argument("--output", default="kernels.json", help="name of the result file")
    parser.add_argument(
        "--limit-s", type=float, default=460.0, help="start no case after this time"
    )
    parser.add_argument("--peers", type=Path, help="folder with other implementations' binaries")
    parser.add_argument(
        "--peers-s", type=float, default=150.0, help="seconds of their times per kernel"
    )
    options = parser.parse_args(argv)
    dispatch = default_dispatch()
    if dispatch.backend is not Backend.PALLAS:
        parser.error(f"needs an NVIDIA GPU, found {jax.default_backend()}")
    begin = time.monotonic()
    ceilings = measure_ceilings()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.flops / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    print(
        f"{'kernel':<12} {'case':<36} {'ms':>8} {'TB/s':>6} {'share':>6} {'TFLOP/s':>8} {'share':>6} "
        f"{'error':>8}  others, ms",
        flush=True,
    )
    results: list[dict[str, Any]] = []
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.now().isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.kernels", *(argv or sys.argv[1:])]),
        "bytes_per_s": ceilings.bytes_per_s,
        "flops": ceilings.flops,
        "results": results,
    }
    path = Path(os.environ.get("OUT", ".")) / options.output
    for name in options.only:
        for build in PROBLEMS[name](dispatch):
            if time.monotonic() - begin > options.limit_s:
                print(f"{name}: out of time")
                break
            tuned = None if options.tune is None else (options.tune or [""])
            results.append(_run(name, build, ceilings, tuned, options.tune_s))
            path.write_text(json.dumps(report, indent=1))
        left = min(options.peers_s, options.limit_s - (time.monotonic() - begin))
        if options.peers is not None and name in KERNELS and left > 0:
            for line in add_times(results, measure_peers(name, options.peers, left)):
                print(line, flush=True)
            path.write_text(json.dumps(report, indent=1))
    report["targets"] = target_rows(report)
    path.write_text(json.dumps(report, indent=1))
    print(f"\n{markdown_table(report['targets'])}")
    failed = [r for r in results if r.get("failure")]
    print(f"{len(results)} cases, {len(failed)} failed, {time.monotonic() - begin:.0f} s, {path}")
    return len(failed)


def _run(
    name: str, build: Any, ceilings: Ceilings, tuned: list[str] | None, tune_s: float
) -> dict[str, Any]:
    """Check, time and print one case. A failure is part of the result: the other cases must still run."""
    result: dict[str, Any] = {"kernel": name}
    try:
        problem = build()
        result |= {"kernel": problem.kernel, "case": problem.case}
        result |= _measure(problem, ceilings)
    except Exception as error:
        result["failure"] = f"{type(error).__name__}: {error}"
        print(
            f"{result['kernel']:<12} {result.get('case', ''):<36} FAILED {result['failure'][:300]}"
        )
        print("\n".join(traceback.format_exc().splitlines()[-6:])[:1500], flush=True)
        return result
    if tuned is not None and any(text in problem.case for text in tuned):
        result["tiles"] = _tune(problem, result["ms"], tune_s)
    return result


def _measure(problem: Problem, ceilings: Ceilings) -> dict[str, Any]:
    error = problem.check()
    if not error <= problem.limit:
        raise AssertionError(f"error {error:.3g} exceeds {problem.limit:.3g}")
    ms = time_ms(problem.run, problem.arguments, problem.expected_ms)
    rate, flops = problem.num_bytes / ms * 1e3, problem.flops / ms * 1e3
    peers = {}
    for peer, measure in problem.peers.items():
        try:
            peers[peer] = measure()
        except Exception as failure:
            print(f"  {peer} did not run: {type(failure).__name__}: {str(failure)[:200]}")
    shares = rate / ceilings.bytes_per_s, flops / ceilings.flops
    print(
        f"{problem.kernel:<12} {problem.case:<36} {ms:8.4f} {rate / 1e12:6.2f} {shares[0]:6.0%} "
        f"{flops / 1e12:8.1f} {shares[1]:6.0%} {error:8.1e}  {with_ratios(peers, ms)}",
        flush=True,
    )
    return {
        "ms": ms,
        "bytes_per_s": rate,
        "flops": flops,
        "error": error,
        "peers_ms": peers,
        "tile": None if problem.tile is None else label(problem.tile),
    }


def _tune(problem: Problem, default_ms: float, seconds: float) -> dict[str, Any]:
    """Times of the variants in ms (text where one does not compile); prints those that beat the default by 3 %.

    All cores compile first, for two thirds of the time; nothing compiles while something is timed.
    """
    times: dict[str, Any] = {}
    begin = time.monotonic()

    def build(run: Any) -> Any:
        if time.monotonic() - begin > seconds * 2 / 3:
            return None
        try:
            return repeat(run, problem.arguments, problem.expected_ms)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:160]}"

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        built = list(pool.map(build, problem.variants.values()))
    for name, program in zip(problem.variants, built):
        if isinstance(program, str):
            times[name] = program
        elif program is not None and time.monotonic() - begin < seconds:
            times[name] = program.time_ms(problem.arguments)
    skipped = len(problem.variants) - len(times)
    timed = sorted((t, name) for name, t in times.items() if isinstance(t, float))
    for ms, name in timed[:3]:
        if ms < 0.97 * default_ms:
            print(f"  better: {ms:.4f} ms with {name}", flush=True)
    refused = sum(not isinstance(t, float) for t in times.values())
    if times:
        print(
            f"  {len(timed)} other tiles timed, {refused} refused, {skipped} out of time; "
            f"default {label(problem.tile)}",
            flush=True,
        )
    return times


if __name__ == "__main__":
    raise SystemExit(main())
