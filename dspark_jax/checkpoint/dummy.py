"""Random weights in the storage of a released checkpoint, made on the device: for benchmarks without a checkpoint.

The trees are those that `load_checkpoint` gives: same structure, shapes, dtypes and layout. Codes are random
bits, so memory traffic, arithmetic and power are those of a real model; scales bring a matrix product to unit
variance, so that activations stay finite through any number of layers.
"""

from __future__ import annotations

import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.checkpoint.formats import fp8_scale_shape
from dspark_jax.checkpoint.names import flatten_specs
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import ModelConfig
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.kernels.quantized import (
    FP4_RUN,
    Fp4Weight,
    Fp8Weight,
    Weight,
    fp4_packed_shape,
    fp4_scale_shape,
)
from dspark_jax.model.params import Params, Spec, param_specs

_BIAS = 127
# Root mean square of the values of uniformly random codes. All e4m3 codes but NaN; all e2m1 codes.
_FP8_RMS = float(
    np.sqrt(
        np.mean(
            np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
            .view(jnp.float8_e4m3fn)
            .astype(np.float64)
            ** 2
        )
    )
)
_FP4_RMS = float(np.sqrt(np.mean(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) ** 2)))


def dummy_params(
    cfg: ModelConfig,
    *,
    dtype: Any = jnp.float32,
    keep_quantized: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Params, DraftParams | None]:
    """Random parameters of the target and, where `cfg` has one, of the drafter.

    Args:
      cfg: the model; `expert_dtype` says how experts are stored.
      dtype: of everything that the released files keep in bfloat16.
      keep_quantized: fp8 and fp4 matrices as in the files, else as plain arrays of `dtype`.
      seed: of all values; a leaf depends on it and on its own path only.
      progress: show a bar.

    Raises `CheckpointError` for shapes that the storage cannot hold, and for an unknown `expert_dtype`.
    """
    trees: dict[str, Any] = {"target": param_specs(cfg)}
    if cfg.draft is not None:
        trees["draft"] = draft_specs(cfg)
    leaves = [(name, path, spec) for name in trees for path, spec in flatten_specs(trees[name])]

    def make(leaf: tuple[str, tuple[str, ...], Spec]) -> Weight:
        name, path, spec = leaf
        key = np.uint32(zlib.crc32(f"{seed} {name} {'.'.join(path)}".encode()))
        array = _leaf(spec, cfg, dtype, keep_quantized, key)
        bar.update()
        return array

    # The time goes into compiling one small program per shape.
    with (
        tqdm(total=len(leaves), unit="leaf", desc="dummy weights", disable=not progress) as bar,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        made = iter(list(pool.map(make, leaves)))
    filled = {
        name: jax.tree.map(lambda _: next(made), tree, is_leaf=_is_spec)
        for name, tree in trees.items()
    }
    return filled["target"], filled.get("draft")


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, Spec)


def storage_of(spec: Spec, cfg: ModelConfig) -> str:
    """How a released checkpoint stores the leaf: "fp8", "fp4", "bf16", "f32" or "i64".

    Raises `CheckpointError` for an `expert_dtype` that is none of them.
    """
    storage = cfg.expert_dtype if spec.storage == "expert" else spec.storage
    if storage not in ("fp8", "fp4", "bf16", "f32", "i64"):
        raise CheckpointError(f"expert_dtype {storage!r} is unknown; known are fp4 and fp8")
    return storage


def abstract_params(
    cfg: ModelConfig, *, dtype: Any = jnp.float32, keep_quantized: bool = False
) -> tuple[Any, Any]:
    """The two trees of `dummy_params` as `jax.ShapeDtypeStruct`s; nothing is allocated."""

    def leaf(spec: Spec) -> Any:
        return jax.eval_shape(lambda: _leaf(spec, cfg, dtype, keep_quantized, np.uint32(0)))

    target = jax.tree.map(leaf, param_specs(cfg), is_leaf=_is_spec)
    drafter = jax.tree.map(leaf, draft_specs(cfg), is_leaf=_is_spec) if cfg.draft else None
    return target, drafter


def _leaf(spec: Spec, cfg: ModelConfig, dtype: Any, keep_quantized: bool, key: Any) -> Weight:
    storage = storage_of(spec, cfg)
    shape, columns = spec.shape, spec.shape[-1]
    if storage == "i64":
        return _table(key, shape=shape, experts=cfg.n_routed_experts)
    if spec.init != "matrix":
        kept = jnp.float32 if storage == "f32" else dtype
        return jnp.full(shape, 1 if spec.init == "one" else 0, kept)
    if keep_quantized and storage == "fp8":
        codes = _stacked(key, shape=shape, kind="fp8", value=0)
        exponent = _exponent(columns, _FP8_RMS)
        scale = _stacked(key ^ 1, shape=fp8_scale_shape(shape), kind="fp8_scale", value=exponent)
        return Fp8Weight(codes, scale)
    if keep_quantized and storage == "fp4":
        packed = _stacked(key, shape=fp4_packed_shape(shape), kind="fp4", value=0)
        exponent = _exponent(columns, _FP4_RMS)
        scale = _stacked(
            key ^ 1,
            shape=fp4_scale_shape(shape),
            kind="fp4_scale",
            value=exponent,
            runs=columns // FP4_RUN,
        )
        return Fp4Weight(packed, scale)
    kept = jnp.float32 if storage == "f32" else dtype
    return _stacked(key, shape=shape, kind=np.dtype(kept).name, value=columns**-0.5)


def _exponent(columns: int, rms: float) -> int:
    """The ue8m0 byte that brings rows of `columns` codes nearest to unit length."""
    return _BIAS + round(math.log2(columns**-0.5 / rms))


@partial(jax.jit, static_argnames=("shape", "kind", "value", "runs"))
def _stacked(
    key: jax.Array, *, shape: tuple[int, ...], kind: str, value: float, runs: int = 0
) -> jax.Array:
    """An array of one kind of values, drawn one leading index at a time: the stack is the only large array.

    Every index of the leading axis has numbers of its own, of at most 2^32 elements. `value` is the scale byte of
    the two kinds of scales, and the standard deviation of plain numbers.
    """
    *lead, rows, columns = (1,) * (2 - len(shape)) + shape
    count = math.prod(lead[1:]) * rows
    first = lead[0] if lead else 1
    matrix = partial(_matrix, shape=(count, columns), kind=kind, value=value, runs=runs)
    like = jax.eval_shape(matrix, key)

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        drawn = matrix(_mix(key + _mix(jnp.uint32(i) + jnp.uint32(0x9E3779B9))))
        return jax.lax.dynamic_update_index_in_dim(out, drawn, i, 0)

    out = jnp.zeros((first, count, columns), like.dtype)
    return jax.lax.fori_loop(0, first, fill, out).reshape(shape)


def _matrix(
    key: jax.Array, *, shape: tuple[int, int], kind: str, value: float, runs: int
) -> jax.Array:
    if kind == "fp4":
        words = _words(key, (shape[0], shape[1] // 2))
        return jax.lax.bitcast_convert_type(words, jnp.int16).reshape(shape)
    if kind == "fp8":
        codes = _bytes(key, shape)
        # The two NaN codes become the largest numbers.
        codes = jnp.where(codes & 0x7F == 0x7F, codes - 1, codes)
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    if kind == "fp8_scale":
        return jnp.full(shape, int(value), jnp.uint8)
    if kind == "fp4_scale":
        # Four exponents to a word; those of runs that do not exist are zero.
        word = jax.lax.broadcasted_iota(jnp.int32, shape, 0) % max(-(-runs // 4), 1)
        used = jnp.clip(runs - 4 * word, 0, 4)
        full = jnp.uint32(int(value) * 0x01010101)
        mask = jnp.where(used == 4, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (8 * used)) - 1)
        return jax.lax.bitcast_convert_type(full & mask.astype(jnp.uint32), jnp.int32)
    # The sum of four bytes is near enough to normal: variance 4 (256^2 - 1) / 12, mean 510.
    words = _words(key, shape)
    total = sum((words >> shift) & 0xFF for shift in (0, 8, 16, 24))
    normal = (jnp.asarray(total).astype(jnp.float32) - 510.0) / math.sqrt((256**2 - 1) / 3)
    return (normal * value).astype(kind)


def _bytes(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Random bytes: four from a word where the width allows it."""
    rows, columns = shape
    if columns % 4:
        return _words(key, shape).astype(jnp.uint8)
    words = _words(key, (rows, columns // 4))
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(shape)


def _words(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One random 32-bit word per element: a hash of its place, so that no temporary array is needed."""
    rows = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return _mix(key + _mix(rows * jnp.uint32(shape[1]) + columns))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words that avalanches: multiply and shift, twice (Wellons' "lowbias32" constants)."""
    x = jnp.asarray(x, jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


@partial(jax.jit, static_argnames=("shape", "experts"))
def _table(key: jax.Array, *, shape: tuple[int, ...], experts: int) -> jax.Array:
    """Different experts for every token: a first one, the next ones at a step that is prime to their number."""
    chosen = shape[-1]
    words = _words(key, (math.prod(shape[:-1]), 1)).reshape(*shape[:-1], 1)
    steps = jnp.array([s for s in range(1, experts + 1) if math.gcd(s, experts) == 1], jnp.uint32)
    step = steps[(words >> 16) % len(steps)]
    ids = (words % experts + step * jnp.arange(chosen, dtype=jnp.uint32)) % experts
    return ids.astype(jnp.int32)
