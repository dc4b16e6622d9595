"""Norm, rotation and rounding of a step's latent rows.

What stores them in pages is the same kernel with another end; its pool would have to be a carry, or be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernel_problems.problem import Problem, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.latent_rows import cases as latent_cases
from dspark_jax.kernels.latent_rows import pallas_triton as latent_rows
from dspark_jax.kernels.latent_rows.reference import finish_rows_reference
from dspark_jax.kernels.rows import RowFormat, empty_rows


def latent_rows_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Rows of decode steps and of a long prompt, rounded."""
    for rows in (8, 64, 256, 2048):
        yield partial(_finish, latent_cases.Case("", rows, **latent_cases.ROWS), dispatch)


def _finish(case: latent_cases.Case, dispatch: Dispatch) -> Problem:
    made = latent_cases.make(case, 11, jnp.bfloat16)
    layers = 8
    rounded = {"num_rotary": case.rotary, "dtype": jnp.bfloat16}
    arrays = {
        "raw": made["raw"],
        "gain": jnp.stack([made["gain"][made["layer"]]] * layers),
        "like": empty_rows((), case.width, RowFormat.ROUNDED, **rounded),
        **dict(zip(("cos", "sin"), made["angles"])),
    }

    def run(warps, arrays, i):
        return latent_rows.finish_rows_pallas(
            **arrays, layer=i % layers, eps=made["eps"], dispatch=dispatch, num_warps=warps
        )

    def reference(arrays, i):
        return finish_rows_reference(**arrays, layer=i % layers, eps=made["eps"])

    def check() -> float:
        out, expected = (jax.jit(f)(arrays, jnp.int32(1)) for f in (partial(run, 1), reference))
        return relative_error(out.astype(jnp.float32), expected.astype(jnp.float32))

    return Problem(
        kernel="latent_rows",
        case=f"{case.rows}x{case.width}, {case.rotary} rotary",
        arguments=arrays,
        run=partial(run, 1),
        check=check,
        num_bytes=4.0 * case.rows * (case.width + case.rotary) + 2.0 * case.width,
        flops=0.0,
        expected_ms=0.003,
        # A value beside an edge between two codes may turn, even the largest.
        limit=0.1,
        variants={f"warps={warps}": partial(run, warps) for warps in (2, 4)},
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )
