"""Time other implementations beside one of our kernels; a line of JSON per time goes to a file.

    python -m benchmarks.kernel_peers sparse_mla --peers .peers --output peers.jsonl

`benchmarks.kernels` starts this as a process of its own, one per kernel: a peer that breaks the GPU's context,
takes too long or ends the process costs its own times and nothing else, and its memory is free afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import torch

from benchmarks.kernel_peers.call import PeerCase, measure
from benchmarks.kernel_peers.deep_gemm import deep_gemm_cases
from benchmarks.kernel_peers.flash_mla import flash_mla_cases
from benchmarks.peer_times import KERNELS


def main(argv: list[str] | None = None) -> int:
    """Measure; the exit status is 1 where nothing could be, for want of a GPU or of the binaries."""
    parser = argparse.ArgumentParser(description="Time other implementations.")
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--peers", type=Path, required=True, help="folder with the binaries")
    parser.add_argument("--output", type=Path, required=True, help="file for the lines of JSON")
    parser.add_argument("--limit-s", type=float, default=600.0, help="start none after this time")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.limit_s
    if not torch.cuda.is_available():
        print(f"peers of {options.kernel}: torch sees no GPU", file=sys.stderr)
        return 1
    # Shapes and routing come from our own modules; the GPU belongs to torch here.
    jax.config.update("jax_platforms", "cpu")
    try:
        with options.output.open("w") as output:
            for case in cases(options.kernel, options.peers):
                if time.monotonic() > end:
                    print(f"peers of {case.kernel}: out of time before {case.case}, {case.name}")
                    break
                output.write(json.dumps(measure(case)) + "\n")
                output.flush()
    except Exception as failure:  # of loading the binaries: `measure` keeps its own
        reason = " ".join(str(failure).split())
        print(f"peers of {options.kernel}: {type(failure).__name__}: {reason}", file=sys.stderr)
        return 1
    return 0


def cases(kernel: str, folder: Path) -> Iterator[PeerCase]:
    """The times to take beside one kernel."""
    if kernel == "sparse_mla":
        return flash_mla_cases(folder)
    return deep_gemm_cases(folder, kernel)


if __name__ == "__main__":
    raise SystemExit(main())
