"""Problems for tests and benchmarks of `stacked_linear`, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.expert_mlp.cases import random_weight


@dataclass(frozen=True)
class Case:
    """T tokens through a matrix [groups * outputs, inner], one of `layers`."""

    name: str
    tokens: int
    outputs: int
    inner: int
    storage: str
    groups: int = 1
    layers: int = 2


TEST_CASES = (
    Case("one_token", 1, 32, 48, "plain"),
    Case("groups", 19, 16, 32, "plain", groups=3),
    Case("blocks", 5, 256, 256, "fp8"),
    Case("groups", 3, 128, 256, "fp8", groups=2),
    Case("runs", 5, 48, 64, "fp4"),
    Case("odd_words", 5, 48, 192, "fp4"),
)

FLASH = {
    "w_q_a": (1024, 4096, 1),
    "w_q_b": (32768, 1024, 1),
    "w_kv": (512, 4096, 1),
    "w_o_a": (1024, 4096, 8),
    "w_o_b": (4096, 8192, 1),
    "w_shared_gate_up": (4096, 4096, 1),
    "w_shared_down": (4096, 2048, 1),
}
"""Outputs, inputs and groups of a layer's linears at Flash size, by their names in `model.params.Block`."""


def make(case: Case, seed: int, dtype: Any) -> dict[str, Any]:
    """Arguments of `stacked_linear` by name, without `dispatch`. Plain layers that must not be read hold NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.tokens, case.groups, case.inner), dtype=np.float32)
    shape = (case.layers, case.groups * case.outputs, case.inner)
    return {
        "x": jnp.asarray(x, dtype),
        "stack": random_weight(jax.random.key(seed), shape, case.storage, dtype),
        "layer": jnp.int32(case.layers - 1),
    }
