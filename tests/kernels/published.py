"""Abstract arguments of every operation at the published sizes, shared by lowering and compilation tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.kernels.compress import compress
from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.hyper import hyper_enter, hyper_leave
from dspark_jax.kernels.index_topk import index_topk
from dspark_jax.kernels.latent_rows import finish_rows, store_rows
from dspark_jax.kernels.linear import stacked_linear
from dspark_jax.kernels.linear.pallas_triton import MANY_TOKENS
from dspark_jax.kernels.quantized import (
    Fp4Weight,
    Fp8Weight,
    Weight,
    fp4_packed_shape,
    fp4_scale_shape,
)
from dspark_jax.kernels.router import route
from dspark_jax.kernels.rows import RowFormat, empty_keys, empty_rows
from dspark_jax.kernels.sparse_mla import sparse_mla

MODELS = {
    "flash": {"model": 4096, "heads": 64, "experts": 256, "width": 2048, "topk": 512, "layers": 43},
    "pro": {"model": 7168, "heads": 128, "experts": 384, "width": 3072, "topk": 1024, "layers": 61},
}


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    """Abstract array."""
    return jax.ShapeDtypeStruct(dims, dtype)


ints, floats, halves = (partial(shape, t) for t in (jnp.int32, jnp.float32, jnp.bfloat16))


def weight(storage: str, *dims: int) -> Weight:
    """Abstract weight [..., N, K] in a storage."""
    *lead, rows, inner = dims
    if storage == "fp4":
        return Fp4Weight(
            shape(jnp.int16, *fp4_packed_shape(dims)), shape(jnp.int32, *fp4_scale_shape(dims))
        )
    if storage == "fp8":
        return Fp8Weight(
            shape(jnp.float8_e4m3fn, *dims), shape(jnp.uint8, *lead, rows // 128, inner // 128)
        )
    return halves(*dims)


def cache_rows(row_format: RowFormat, *lead: int) -> Any:
    """Abstract cache rows, of 512 channels with 64 rotary ones."""
    make = partial(empty_rows, lead, 512, row_format, num_rotary=64, dtype=jnp.bfloat16)
    return jax.eval_shape(make)


def index_keys(row_format: RowFormat, *lead: int) -> Any:
    """Abstract indexer keys."""
    return jax.eval_shape(partial(empty_keys, lead, 128, row_format, dtype=jnp.bfloat16))


LINEARS = {
    "flash": {"w_q_a": (1024, 4096, 1), "w_kv": (512, 4096, 1), "w_o_a": (1024, 4096, 8)},
    "pro": {"w_q_b": (65536, 1536, 1), "w_o_b": (7168, 16384, 1)},
}
"""Outputs, inputs and groups of linears that differ in which way they are cut."""


def _linears(
    model: str, tokens: int, dispatch: Dispatch
) -> dict[str, tuple[Callable[..., Any], Any, int]]:
    return {
        f"linear {model} {name} {storage}": (
            lambda tree: stacked_linear(**tree, layer=5, dispatch=dispatch),
            {
                "x": halves(tokens, groups, inner),
                "stack": weight(storage, MODELS[model]["layers"], groups * outputs, inner),
            },
            1 if tokens < MANY_TOKENS else 0,
        )
        for name, (outputs, inner, groups) in LINEARS[model].items()
        for storage in ("fp8", "plain")
    }


def problems(tokens: int, capability: int = 90) -> dict[str, tuple[Callable[..., Any], Any, int]]:
    """Name -> function of one tree, its abstract arguments, and how many kernels it calls."""
    dispatch = Dispatch(Backend.PALLAS, capability=capability)
    found: dict[str, tuple[Callable[..., Any], Any, int]] = {}
    rows = {name: ints(tokens) for name in ("slots", "positions", "starts", "row_heads")}
    for model, size in MODELS.items():
        for row_format in (RowFormat.PLAIN, RowFormat.FP8):
            found[f"sparse_mla {model} {row_format.value}"] = (
                lambda tree: sparse_mla(
                    **tree, layer=3, entry_layer=1, norm_eps=1e-6, dispatch=dispatch
                ),
                {
                    "q": halves(tokens, size["heads"], 512),
                    "window": cache_rows(row_format, size["layers"], 256, 128),
                    "step_rows": halves(tokens, 512),
                    "entries": cache_rows(row_format, 21, 8192, 64),
                    "attn_sink": floats(size["heads"]),
                    **rows,
                    "is_token": shape(jnp.bool_, tokens),
                    "entry_places": ints(tokens, size["topk"]),
                    "entry_counts": ints(tokens),
                    "rotation": (floats(tokens, 32), floats(tokens, 32)),
                },
                # Queries of few tokens have a kernel of their own beside plain rows; parts are merged by one.
                1
                + (row_format is RowFormat.PLAIN and tokens < 256)
                + (tokens * size["heads"] <= 64 * 64),
            )
            for entries, kernels in ((8192, 2), (65536, 3)):
                found[f"index_topk {model} {row_format.value} {entries}"] = (
                    lambda tree, k=size["topk"]: index_topk(
                        **tree, layer=2, k=k, dispatch=dispatch
                    ),
                    {
                        "q": halves(tokens, 64, 128),
                        "head_weights": floats(tokens, 64),
                        "index_keys": index_keys(row_format, 21, 8192, 64),
                        "page_table": ints(256, entries // 64),
                        "slots": ints(tokens),
                        "counts": ints(tokens),
                    },
                    kernels,
                )
        for storage in ("fp4", "fp8", "plain"):
            stack = (size["layers"], size["experts"])
            found[f"expert_mlp {model} {storage}"] = (
                lambda tree: expert_mlp(**tree, layer=4, limit=10.0, dispatch=dispatch),
                {
                    "x": halves(tokens, size["model"]),
                    "expert_ids": ints(tokens, 6),
                    "weights": floats(tokens, 6),
                    "w_gate_up": weight(storage, *stack, 2 * size["width"], size["model"]),
                    "w_down": weight(storage, *stack, size["model"], size["width"]),
                },
                4,
            )
        for name, hashed in (("router", False), ("router with a table", True)):
            found[f"{name} {model}"] = (
                lambda tree: route(**tree, layer=1, k=6, scale=1.5, dispatch=dispatch),
                {
                    "logits": floats(tokens, size["experts"]),
                    "bias": floats(size["layers"], size["experts"]),
                    "is_token": shape(jnp.bool_, tokens),
                    **({"table": ints(3, 129280, 6), "token_ids": ints(tokens)} if hashed else {}),
                },
                1,
            )
        found |= _linears(model, tokens, dispatch)
        found[f"hyper_enter {model}"] = (
            lambda tree: hyper_enter(
                **tree, layer=1, iterations=20, eps=1e-6, norm_eps=1e-6, dispatch=dispatch
            ),
            {
                "streams": halves(tokens, 4, size["model"]),
                "w_fn": floats(size["layers"], 24, 4 * size["model"]),
                "base": floats(size["layers"], 24),
                "scale": floats(size["layers"], 3),
                "gain": halves(size["layers"], size["model"]),
            },
            2,
        )
        found[f"hyper_leave {model}"] = (
            lambda tree: hyper_leave(**tree, dispatch=dispatch),
            {
                "streams": halves(tokens, 4, size["model"]),
                "output": halves(tokens, size["model"]),
                "post": floats(tokens, 4),
                "comb": floats(tokens, 4, 4),
            },
            1,
        )
    for name, ratio, overlap in (("csa", 4, True), ("hca", 128, False)):
        channels = 512 * (4 if overlap else 2)
        found[f"compress {name}"] = (
            lambda tree, ratio=ratio, overlap=overlap: compress(
                **tree, layer=1, ratio=ratio, overlap=overlap, dispatch=dispatch
            ),
            {
                "step_rows": floats(tokens, channels),
                "open_rows": floats(20, 256, ratio * (2 if overlap else 1), channels),
                "closing": ints(tokens // ratio + 1),
                **rows,
            },
            1,
        )
    return found | _latent_rows(tokens, dispatch)


def _latent_rows(tokens: int, dispatch: Dispatch) -> dict[str, tuple[Callable[..., Any], Any, int]]:
    found: dict[str, tuple[Callable[..., Any], Any, int]] = {}
    angles = (floats(tokens, 32), floats(tokens, 32))
    for row_format in RowFormat:
        found[f"latent_rows finish {row_format.value}"] = (
            lambda tree: finish_rows(**tree, layer=3, eps=1e-6, dispatch=dispatch),
            {
                "raw": halves(tokens, 512),
                "gain": halves(43, 512),
                "like": cache_rows(row_format, 43, 256, 128),
                "angles": angles,
            },
            1,
        )
        for name, empty in (("rows", cache_rows), ("keys", index_keys)):
            pool = empty(row_format, 20, 2048, 64)
            width = pool.shape[-1]
            found[f"latent_rows store {name} {row_format.value}"] = (
                lambda tree: store_rows(**tree, layer=3, eps=1e-6, dispatch=dispatch),
                {
                    "pool": pool,
                    "raw": floats(tokens, width),
                    "gain": halves(20, width),
                    "page": ints(tokens),
                    "offset": ints(tokens),
                    "angles": angles,
                },
                1,
            )
    return found
