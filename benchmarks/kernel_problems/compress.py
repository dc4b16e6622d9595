"""Closing windows of the compressor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.problem import Problem, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels import compress as compress_op
from dspark_jax.kernels.compress import cases as compress_cases
from dspark_jax.kernels.dispatch import Dispatch


def compress_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Closing windows of decode steps."""
    for name, size in (("csa", compress_cases.CSA), ("hca", compress_cases.HCA)):
        for tokens in (64, 1024):
            yield partial(_compress, name, compress_cases.decode_case(tokens, **size), dispatch)


def _compress(name: str, case: compress_cases.Case, dispatch: Dispatch) -> Problem:
    made = compress_cases.make(case, 9)
    layers = 4
    fixed = {"ratio": case.ratio, "overlap": case.overlap}
    arrays = {k: v for k, v in made.items() if k not in fixed and k != "layer"}
    arrays["open_rows"] = jnp.stack([made["open_rows"][1]] * layers)

    def run(arrays, i, dispatch=dispatch):
        return compress_op.compress(**arrays, layer=i % layers, **fixed, dispatch=dispatch)

    reference = partial(run, dispatch=Dispatch())
    used = np.asarray(made["closing"]) < made["step_rows"].shape[0]

    def check() -> float:
        out, expected = (jax.jit(f)(arrays, jnp.int32(1)) for f in (run, reference))
        return relative_error(np.asarray(out)[used], np.asarray(expected)[used])

    span = case.ratio * (2 if case.overlap else 1)
    return Problem(
        kernel="compress",
        case=f"{name} {case.name}, {used.sum()} close",
        arguments=arrays,
        run=run,
        check=check,
        num_bytes=8.0 * case.width * span * int(used.sum()),
        flops=0.0,
        expected_ms=0.01,
        limit=1e-4,
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )
