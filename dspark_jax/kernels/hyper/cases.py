"""Problems for tests and benchmarks of `hyper_enter` and `hyper_leave`, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """T tokens of N streams of M channels."""

    name: str
    tokens: int
    model: int
    streams: int = 4
    iterations: int = 20


TEST_CASES = (
    Case("one_token", 1, 64),
    Case("no_power_of_two", 19, 48),
    Case("two_streams", 5, 32, streams=2),
    Case("many_tokens", 131, 16),
)


def make(case: Case, seed: int, dtype: Any) -> dict[str, Any]:
    """Arguments of `hyper_enter` by name, without `dispatch`; the layer that must not be read holds NaN."""
    rng = np.random.default_rng(seed)
    n, model = case.streams, case.model
    outputs = (2 + n) * n

    def stack(*shape: int, scale: float = 1.0) -> np.ndarray:
        out = np.full((2, *shape), np.nan, np.float32)
        out[1] = rng.standard_normal(shape, dtype=np.float32) * scale
        return out

    return {
        "streams": jnp.asarray(
            rng.standard_normal((case.tokens, n, model), dtype=np.float32) * 2, dtype
        ),
        "w_fn": jnp.asarray(stack(outputs, n * model, scale=(n * model) ** -0.5)),
        "base": jnp.asarray(stack(outputs)),
        "scale": jnp.asarray(stack(3)),
        "gain": jnp.asarray(stack(model), dtype),
        "layer": jnp.int32(1),
        "iterations": case.iterations,
        "eps": 1e-6,
        "norm_eps": 1e-6,
    }


def make_output(case: Case, seed: int, dtype: Any) -> jnp.ndarray:
    """A block's output [T, M] for `hyper_leave`."""
    rng = np.random.default_rng(seed + 1)
    return jnp.asarray(rng.standard_normal((case.tokens, case.model), dtype=np.float32), dtype)
