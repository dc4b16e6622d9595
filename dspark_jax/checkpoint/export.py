"""Writing parameter trees as a checkpoint folder in the released layout."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from tqdm import tqdm

from dspark_jax.checkpoint.config_json import write_config
from dspark_jax.checkpoint.formats import decode_fp4, decode_fp8, encode_fp4, encode_fp8
from dspark_jax.checkpoint.names import Entry, draft_entries, flatten_specs, target_entries
from dspark_jax.checkpoint.safetensors import CheckpointError, write_folder
from dspark_jax.config import ModelConfig
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.kernels.quantized import FP8_BLOCK, Fp4Weight, Fp8Weight, unpack_fp4_scale
from dspark_jax.model.params import Params, param_specs


def export_checkpoint(
    folder: str | Path,
    cfg: ModelConfig,
    params: Params,
    draft_params: DraftParams | None,
    *,
    quantize: bool = True,
    narrow_mixes: bool = False,
    max_shard_bytes: int | None = None,
    progress: bool = False,
) -> None:
    """Write the tensors of `params` and `draft_params`, then `config.json`, into a folder without a checkpoint.

    Plain matrices are rounded to what released files hold: fp8 blocks for linears, `cfg.expert_dtype` for experts,
    bf16 for the rest but a few float32 tensors. Quantised leaves are written as they are. With `quantize=False`
    everything is float32 and nothing is lost. `narrow_mixes` writes the projections of the hyper-connections, the
    largest float32 tensors, in bf16; this project's loader accepts them by their dtype.

    `draft_params=None` writes the target alone, whatever `cfg.draft` says. Calibration is written only where it
    isn't the identity, since other loaders don't know it.

    The result is one `model.safetensors`, or shards of at most `max_shard_bytes` with an index; equal trees give
    equal bytes. At most one shard is held in memory.

    Raises `CheckpointError` for leaves whose shape or storage isn't what `cfg` asks for, for NaN or infinity in a
    matrix to be rounded, and for a folder that holds safetensors files already.
    """
    if cfg.expert_dtype not in ("fp4", "fp8"):
        raise CheckpointError(f"expert_dtype {cfg.expert_dtype!r} is not supported; use fp4 or fp8")
    if draft_params is None:
        cfg = dataclasses.replace(cfg, draft=None)
    elif cfg.draft is None:
        raise CheckpointError("draft_params are given, but cfg.draft is None")
    trees: list[tuple[Any, list[Entry]]] = [(params, target_entries(cfg))]
    _check_shapes(params, param_specs(cfg))
    if draft_params is not None:
        _check_shapes(draft_params, draft_specs(cfg))
        is_calibrated = _is_calibrated(draft_params)
        trees.append(
            (draft_params, [e for e in draft_entries(cfg) if is_calibrated or not e.optional])
        )
    with tqdm(
        total=sum(len(entries) for _, entries in trees),
        unit="tensor",
        desc="writing",
        disable=not progress,
    ) as bar:
        tensors = itertools.chain.from_iterable(
            _tensors(
                tree,
                _narrowed(entries) if narrow_mixes else entries,
                cfg.expert_dtype,
                quantize,
                bar,
            )
            for tree, entries in trees
        )
        write_folder(folder, tensors, max_shard_bytes)
    write_config(folder, cfg, quantized=quantize)


def _narrowed(entries: Sequence[Entry]) -> list[Entry]:
    return [
        entry._replace(storage="bf16") if entry.path[-1] == "w_fn" else entry for entry in entries
    ]


def _is_calibrated(draft_params: DraftParams) -> bool:
    scale, offset = jax.device_get(
        (draft_params.calibration_scale, draft_params.calibration_offset)
    )
    return bool((scale != 1).any() or (offset != 0).any())


def _check_shapes(tree: Any, specs: Any) -> None:
    wrong = [
        f"{'.'.join(path)} {list(_leaf(tree, path).shape)} instead of {list(spec.shape)}"
        for path, spec in flatten_specs(specs)
        if tuple(_leaf(tree, path).shape) != spec.shape
    ]
    if wrong:
        raise CheckpointError("the tree does not fit its configuration: " + ", ".join(wrong))


def _leaf(tree: Any, path: Sequence[str]) -> Any:
    return functools.reduce(getattr, path, tree)


def _tensors(
    tree: Any, entries: Sequence[Entry], expert_dtype: str, quantize: bool, bar: tqdm
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of everything to be written; only one leaf at a time is copied to the host."""
    for path, group in itertools.groupby(entries, key=lambda entry: entry.path):
        leaf = jax.device_get(_leaf(tree, path))
        for entry in group:
            storage = expert_dtype if entry.storage == "expert" else entry.storage
            try:
                part = _cut(leaf, entry)
                yield from _encode(entry, part, storage) if quantize else _expand(entry, part)
            except CheckpointError as error:
                raise CheckpointError(f"{entry.name}: {error}") from error
            bar.update()


class _Part(NamedTuple):
    """What a leaf holds for one tensor: numbers, or codes of `storage` fp8 or fp4 and their exponents."""

    values: np.ndarray
    exponents: np.ndarray | None = None
    storage: str = "plain"


def _cut(leaf: Any, entry: Entry) -> _Part:
    index, rows = entry.index, entry.rows
    if isinstance(leaf, Fp8Weight):
        scale_rows = rows
        if rows.stop is not None:
            if rows.start % FP8_BLOCK or rows.stop % FP8_BLOCK:
                raise CheckpointError(f"rows {rows.start}:{rows.stop} cut an fp8 block")
            scale_rows = slice(rows.start // FP8_BLOCK, rows.stop // FP8_BLOCK)
        weight, scale = np.asarray(leaf.weight), np.asarray(leaf.scale)
        return _Part(weight[index][rows], scale[index][scale_rows], "fp8")
    if isinstance(leaf, Fp4Weight):
        packed, words = np.asarray(leaf.packed).view(np.uint8), np.asarray(leaf.scale)
        exponents = unpack_fp4_scale(words[index][..., rows], leaf.shape[-1])
        return _Part(packed[index][rows], exponents, "fp4")
    return _Part(leaf[index][rows])


def _encode(entry: Entry, part: _Part, storage: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a released file, as `storage`."""
    dtypes = {"bf16": ml_dtypes.bfloat16, "f32": np.float32, "i64": np.int64}
    if part.exponents is not None and part.storage == storage:
        codes, exponents = part.values, part.exponents
    elif part.exponents is not None:
        raise CheckpointError(f"a matrix kept in {part.storage} cannot be written as {storage}")
    elif storage == "fp8":
        codes, exponents = encode_fp8(part.values)
    elif storage == "fp4":
        codes, exponents = encode_fp4(part.values)
    else:
        yield entry.name, part.values.astype(dtypes[storage])
        return
    # Released files declare packed fp4 as signed bytes.
    yield entry.name, codes.view(np.int8) if storage == "fp4" else codes
    yield entry.scale_name, exponents.view(ml_dtypes.float8_e8m0fnu)


def _expand(entry: Entry, part: _Part) -> Iterator[tuple[str, np.ndarray]]:
    """The one tensor of a file without quantisation."""
    values = part.values
    if part.exponents is not None:
        decode = decode_fp8 if part.storage == "fp8" else decode_fp4
        values = decode(values, part.exponents)
    yield entry.name, values.astype(np.int64 if entry.storage == "i64" else np.float32)
