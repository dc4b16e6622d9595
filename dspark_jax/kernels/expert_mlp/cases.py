"""Problems for tests and benchmarks of `expert_mlp`: sizes, routing, storage, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.quantized import (
    FP4_RUN,
    FP8_BLOCK,
    Fp4Weight,
    Fp8Weight,
    Weight,
    fp4_packed_shape,
    pack_fp4_scale,
)


@dataclass(frozen=True)
class Case:
    """`routing`: "uneven" draws experts with falling odds, "one" sends all to one, "even" cycles through them."""

    name: str
    tokens: int
    experts: int
    model: int
    width: int
    k: int
    storage: str
    routing: str = "uneven"
    padding: int = 0
    layers: int = 2
    limit: float = 10.0


TINY: dict[str, Any] = {"experts": 4, "model": 64, "width": 32, "k": 2}

TEST_CASES = (
    Case("one_token", 1, storage="plain", **TINY),
    Case("padding_only", 0, padding=3, storage="plain", **TINY),
    Case("skewed", 21, padding=2, storage="plain", routing="one", **TINY),
    Case("uneven", 19, storage="fp8", limit=0.3, **TINY),
    Case("uneven", 19, padding=2, storage="fp4", experts=4, model=64, width=64, k=2),
    Case("odd_words", 19, storage="fp4", experts=3, model=192, width=64, k=2),
    Case("wide_runs", 5, storage="fp4", experts=3, model=256, width=64, k=2),
    Case("wide_blocks", 5, storage="fp8", experts=3, model=256, width=128, k=2),
    # Tiles of 64 and, for fp4, 128 rows.
    Case("many_rows", 53, storage="fp8", experts=3, model=256, width=128, k=2),
    Case("many_rows", 53, padding=2, storage="fp4", experts=3, model=192, width=64, k=2),
    Case("most_rows", 109, storage="fp4", experts=3, model=192, width=64, k=2),
)

FLASH: dict[str, Any] = {"experts": 256, "model": 4096, "width": 2048, "k": 6}
PRO: dict[str, Any] = {"experts": 384, "model": 7168, "width": 3072, "k": 6}


def make(case: Case, seed: int, dtype: Any) -> dict[str, Any]:
    """Arguments of `expert_mlp` by name, without `dispatch`. Plain layers that must not be read hold NaN."""
    key = jax.random.key(seed)
    rng = np.random.default_rng(seed)
    odds = {
        "uneven": 1.0 / np.arange(1, case.experts + 1) ** 0.5,
        "even": np.ones(case.experts),
        "one": np.where(np.arange(case.experts) < case.k, 1.0, 1e-9),
    }[case.routing]
    # The k largest of odds times exponential noise are k distinct experts per token.
    noise = np.log(odds) + rng.gumbel(size=(case.tokens + case.padding, case.experts))
    ids = np.argsort(-noise, axis=1)[:, : case.k].astype(np.int32)
    ids[case.tokens :] = case.experts
    x = rng.standard_normal((len(ids), case.model), dtype=np.float32)
    x[case.tokens :] = np.nan
    up, down = jax.random.split(key)
    shape = (case.layers, case.experts)
    return {
        "x": jnp.asarray(x, dtype),
        "expert_ids": jnp.asarray(ids),
        "weights": jnp.asarray(rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)),
        "w_gate_up": random_weight(up, (*shape, 2 * case.width, case.model), case.storage, dtype),
        "w_down": random_weight(down, (*shape, case.model, case.width), case.storage, dtype),
        "layer": jnp.int32(case.layers - 1),
        "limit": case.limit,
    }


def random_weight(key: jax.Array, shape: tuple[int, ...], storage: str, dtype: Any) -> Weight:
    """A stack of matrices [L, ..., N, K] with outputs of about unit variance; plain ones NaN but the last."""
    rows, inner = shape[-2:]
    codes_key, scale_key = jax.random.split(key)
    # Exponents around one over the root of the inner size, so that scales differ within a tile.
    middle = 127 - round(np.log2(inner) / 2)
    if storage == "fp8":
        codes = jax.random.normal(codes_key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)
        blocks = (*shape[:-2], -(-rows // FP8_BLOCK), -(-inner // FP8_BLOCK))
        exponents = jax.random.randint(scale_key, blocks, middle - 1, middle + 2, jnp.int32)
        return Fp8Weight(codes, exponents.astype(jnp.uint8))
    if storage == "fp4":
        bits = jax.random.bits(codes_key, fp4_packed_shape(shape), jnp.uint16)
        packed = jax.lax.bitcast_convert_type(bits, jnp.int16)
        runs = (*shape[:-1], inner // FP4_RUN)
        exponents = jax.random.randint(scale_key, runs, middle - 3, middle + 1, jnp.int32)
        return Fp4Weight(packed, pack_fp4_scale(exponents.astype(jnp.uint8)))
    plain = (jax.random.normal(codes_key, shape, jnp.bfloat16) * inner**-0.5).astype(dtype)
    return plain.at[:-1].set(jnp.nan)
