"""Loading a checkpoint folder into parameter trees."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.checkpoint.check import Storage, check_tensors
from dspark_jax.checkpoint.formats import decode_fp4, decode_fp8, fp4_shapes, fp8_scale_shape
from dspark_jax.checkpoint.names import (
    Entry,
    count_stages,
    detect_naming,
    draft_entries,
    flatten_specs,
    plain_mtp_names,
    target_entries,
)
from dspark_jax.checkpoint.safetensors import CheckpointError, TensorFolder
from dspark_jax.config import ModelConfig, load_config
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.kernels.quantized import (
    FP8_BLOCK,
    Fp4Weight,
    Fp8Weight,
    Weight,
    fp4_scale_shape,
    pack_fp4_scale,
)
from dspark_jax.model.params import Params, Spec, param_specs

ShardingOf = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""(logical axes of an array, its shape) → where it goes. Scales of a quantised weight have the weight's axes."""

_THREADS = 4
_ALIGNMENT = 64  # JAX adopts a host array in place, instead of copying it, at this alignment
_NAN_SCALE = 255


def load_checkpoint(
    folder: str | Path,
    *,
    dtype: Any = jnp.float32,
    keep_quantized: bool = False,
    draft: bool = True,
    sharding_of: ShardingOf | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> tuple[ModelConfig, Params, DraftParams | None]:
    """Read `config.json` and the tensors of a checkpoint in released or Hugging Face naming.

    Quantised matrices (fp8 blocks, packed fp4; told by the file's dtypes) are expanded in float32 on the host and
    cast to `dtype`; with `keep_quantized` they stay as they are, as `Fp8Weight` and `Fp4Weight` stacks. All else
    becomes `dtype`, except what the released files keep in float32 and the hash table (int32).

    With `draft=False` every `mtp.*` tensor is passed over, and the third result and `config.draft` are None. So
    they are when `config.json` describes no DSpark drafter; then only the tensors of an ordinary prediction block
    are passed over, those of a drafter are unexpected. The number of drafter stages is counted in the files. A
    drafter without confidence or Markov head is incomplete; calibration is the identity where files have none.

    Arrays are filled in place from a memory map: the peak is the result and a few single tensors. They go to the
    default device, or where `sharding_of` says. `overrides` replace keys of `config.json`.

    Raises `CheckpointError` with every missing, unexpected, misshapen or mistyped tensor in one message, and
    `ConfigError` for a `config.json` that cannot be run.
    """
    cfg = load_config(folder, overrides)
    source = TensorFolder(folder)
    ignored: set[str] = set()
    if not draft:
        cfg = dataclasses.replace(cfg, draft=None)
        ignored = {name for name in source.infos if name.startswith("mtp.")}
    elif cfg.draft is None:
        ignored.update(*(plain_mtp_names(cfg, i) for i in range(count_stages(source.infos))))
    else:
        cfg = _count_draft_stages(folder, cfg, source.infos)
    target = target_entries(cfg, detect_naming(source.infos))
    drafter = draft_entries(cfg) if cfg.draft else []
    stored = check_tensors(
        folder, [*target, *drafter], source.infos, ignored, keep_quantized=keep_quantized
    )
    with (
        tqdm(total=len(stored), unit="tensor", desc="loading", disable=not progress) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        filler = _Filler(
            source=source,
            stored=stored,
            dtype=np.dtype(dtype),
            keep_quantized=keep_quantized,
            num_experts=cfg.n_routed_experts,
            sharding_of=sharding_of,
            pool=pool,
            bar=bar,
        )
        params = filler.fill_tree(param_specs(cfg), target)
        draft_params = filler.fill_tree(draft_specs(cfg), drafter) if cfg.draft else None
    return cfg, params, draft_params


def _count_draft_stages(folder: str | Path, cfg: ModelConfig, names: Iterable[str]) -> ModelConfig:
    assert cfg.draft is not None
    stages = count_stages(names)
    if not stages:
        raise CheckpointError(
            f"{folder}: config.json describes a DSpark drafter, but no mtp.* tensor is there; "
            "load with draft=False to use the target alone"
        )
    said = json.loads((Path(folder) / "config.json").read_text()).get("dspark_num_stages", stages)
    if said != stages:
        raise CheckpointError(
            f"{folder}: config.json says dspark_num_stages {said}, the tensors have {stages} stages"
        )
    return dataclasses.replace(cfg, draft=dataclasses.replace(cfg.draft, num_stages=stages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Filler:
    """Copies tensors into freshly allocated stacks, several threads at a time."""

    source: TensorFolder
    stored: Mapping[str, Storage]
    dtype: np.dtype
    keep_quantized: bool
    num_experts: int
    sharding_of: ShardingOf | None
    pool: ThreadPoolExecutor
    bar: tqdm

    def fill_tree(self, specs: Any, entries: Sequence[Entry]) -> Any:
        """The tree of arrays that `specs` describes, from those of `entries` that the files have."""
        present: dict[tuple[str, ...], list[Entry]] = {}
        for entry in entries:
            if entry.name in self.stored:
                present.setdefault(entry.path, []).append(entry)
        leaves = [
            self._fill_leaf(spec, present.get(path, [])) for path, spec in flatten_specs(specs)
        ]
        treedef = jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, Spec))
        return jax.tree.unflatten(treedef, leaves)

    def _fill_leaf(self, spec: Spec, entries: Sequence[Entry]) -> Weight:
        storages = {self.stored[entry.name] for entry in entries}
        if self.keep_quantized and storages == {Storage.FP8}:
            codes = _zeros(spec.shape, jnp.float8_e4m3fn)
            scale = _zeros(fp8_scale_shape(spec.shape), np.uint8)
            self._run(lambda entry: self._copy_fp8(entry, codes, scale), entries)
            return Fp8Weight(self._place(codes, spec), self._place(scale, spec))
        if self.keep_quantized and storages == {Storage.FP4}:
            packed = _zeros(fp4_shapes(spec.shape)[0], np.uint8)
            scale = _zeros(fp4_scale_shape(spec.shape), np.int32)
            self._run(lambda entry: self._copy_fp4(entry, packed, scale), entries)
            words = packed.view(np.int16)
            return Fp4Weight(self._place(words, spec), self._place(scale, fp4_scale_spec(spec)))
        out = _zeros(spec.shape, {"i64": np.int32, "f32": np.float32}.get(spec.storage, self.dtype))
        if spec.init == "one" and not entries:
            out[...] = 1
        self._run(lambda entry: self._copy_plain(entry, out), entries)
        return self._place(out, spec)

    def _run(self, copy: Callable[[Entry], None], entries: Sequence[Entry]) -> None:
        for _ in self.pool.map(copy, entries):
            self.bar.update()

    def _copy_plain(self, entry: Entry, out: np.ndarray) -> None:
        value = self.source[entry.name]
        match self.stored[entry.name]:
            case Storage.FP8:
                value = decode_fp8(value, self._exponents(entry))
            case Storage.FP4:
                value = decode_fp4(value.view(np.uint8), self._exponents(entry))
            case Storage.TABLE if value.min() < 0 or value.max() >= self.num_experts:
                raise CheckpointError(
                    f"{entry.name} names experts {value.min()} to {value.max()}, "
                    f"n_routed_experts is {self.num_experts}"
                )
        out[entry.index][entry.rows] = value

    def _copy_fp8(self, entry: Entry, codes: np.ndarray, scale: np.ndarray) -> None:
        rows = entry.rows
        if rows.start is not None:
            rows = slice(rows.start // FP8_BLOCK, rows.stop // FP8_BLOCK)
        codes[entry.index][entry.rows] = self.source[entry.name]
        scale[entry.index][rows] = self._exponents(entry)

    def _copy_fp4(self, entry: Entry, packed: np.ndarray, scale: np.ndarray) -> None:
        packed[entry.index][entry.rows] = self.source[entry.name].view(np.uint8)
        scale[entry.index][..., entry.rows] = pack_fp4_scale(self._exponents(entry))

    def _exponents(self, entry: Entry) -> np.ndarray:
        exponents = self.source[entry.scale_name].view(np.uint8)
        if (exponents == _NAN_SCALE).any():
            raise CheckpointError(f"{entry.scale_name} holds NaN")
        return exponents

    def _place(self, array: np.ndarray, spec: Spec) -> jax.Array:
        if self.sharding_of is None:
            return jax.device_put(array)
        return jax.device_put(array, self.sharding_of(spec.axes, array.shape))


def fp4_scale_spec(spec: Spec) -> Spec:
    """Specification of the scale words of an fp4 matrix with specification `spec`: input runs, then rows."""
    axes = (*spec.axes[:-2], spec.axes[-1], spec.axes[-2])
    return spec._replace(shape=fp4_scale_shape(spec.shape), axes=axes)


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
