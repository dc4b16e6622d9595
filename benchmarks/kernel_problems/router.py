"""The router's choice of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.problem import Problem, label, nearest, relative_error
from benchmarks.kernel_timing import time_ms
from dspark_jax.kernels import router as router_op
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.router import cases as router_cases
from dspark_jax.kernels.router import pallas_triton as router


def router_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Flash and Pro, behind the hash layers."""
    for tokens in (16, 64, 256, 2048, 8192):
        yield partial(_router, "flash", tokens, router_cases.FLASH, dispatch)
    yield partial(_router, "pro", 256, router_cases.PRO, dispatch)


def _router(name: str, tokens: int, size: dict[str, int], dispatch: Dispatch) -> Problem:
    case = router_cases.Case("", tokens, hashed=True, **size)
    made = router_cases.make(case, 10)
    # Behind the hash layers every layer has a bias, and reads no table.
    layers, hash_layers = 8, router_cases.HASH_LAYERS
    arrays = {k: made[k] for k in ("logits", "is_token", "table", "token_ids")}
    arrays["bias"] = jnp.stack([made["bias"][case.layer]] * layers)
    fixed = {"k": case.k, "scale": made["scale"]}

    def run(tile, arrays, i):
        layer = hash_layers + i % (layers - hash_layers)
        return router.route_pallas(**arrays, layer=layer, **fixed, dispatch=dispatch, tile=tile)

    def reference(arrays, i):
        layer = hash_layers + i % (layers - hash_layers)
        return router_op.route_reference(**arrays, layer=layer, **fixed)

    def check() -> float:
        out, expected = (jax.jit(f)(arrays, jnp.int32(1)) for f in (partial(run, None), reference))
        if (np.asarray(out[0]) != np.asarray(expected[0])).any():
            return float("inf")
        return relative_error(out[1], expected[1])

    default = router.default_tile(tokens=tokens, capability=dispatch.capability)
    tiles = [router.Tile(*sizes) for sizes in itertools.product((1, 2, 4, 8), (1, 2, 4))]
    return Problem(
        kernel="router",
        case=f"{name} {case.k} of {tokens}x{case.experts}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=tokens * (4.0 * case.experts + 8 * case.k + 1) + 4.0 * case.experts,
        flops=0.0,
        expected_ms=0.005,
        tile=default,
        limit=1e-4,
        variants={label(tile): partial(run, tile) for tile in nearest(tiles, default, most=2)},
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )
