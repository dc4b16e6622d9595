"""Parameter trees in an orbax store, which several hosts can restore straight into their shards.

A store is a folder with `config.json`, one orbax checkpoint `target` and, with a drafter, another named `draft`.
Leaves are kept bit for bit; a quantised matrix is a nested pair of arrays there as in the tree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from dspark_jax.checkpoint.config_json import write_config
from dspark_jax.checkpoint.formats import fp8_scale_shape
from dspark_jax.checkpoint.load import ShardingOf, fp4_scale_spec
from dspark_jax.checkpoint.names import flatten_specs
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import ModelConfig, load_config
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.kernels.quantized import Fp4Weight, Fp8Weight, fp4_packed_shape
from dspark_jax.model.params import Params, Spec, param_specs

_TARGET = "target"
_DRAFT = "draft"


def save_store(
    folder: str | Path, cfg: ModelConfig, params: Params, draft_params: DraftParams | None
) -> None:
    """Save both trees and `config.json` into `folder`, which must not hold a store yet.

    `draft_params=None` saves the target alone. Raises `CheckpointError` for a folder with a store.
    """
    folder = Path(folder).resolve()
    if is_store(folder):
        raise CheckpointError(f"{folder} already holds a store; save into an empty folder")
    if draft_params is None:
        cfg = dataclasses.replace(cfg, draft=None)
    elif cfg.draft is None:
        raise CheckpointError("draft_params are given, but cfg.draft is None")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / _TARGET, _to_nested(params, param_specs(cfg)))
        if draft_params is not None:
            checkpointer.save(folder / _DRAFT, _to_nested(draft_params, draft_specs(cfg)))
    write_config(folder, cfg, quantized=False)


def is_store(folder: str | Path) -> bool:
    """Whether `folder` is a store."""
    return (Path(folder) / _TARGET / "_METADATA").exists()


def restore_store(
    folder: str | Path, *, draft: bool = True, sharding_of: ShardingOf | None = None
) -> tuple[ModelConfig, Params, DraftParams | None]:
    """Restore what `save_store` saved.

    Every array goes to the default device, or is read directly into the shards that `sharding_of` (logical axes,
    shape → sharding) gives. With `draft=False` the drafter is not read and `config.draft` is None. Raises
    `CheckpointError` when the folder is no store or its arrays don't fit its `config.json`.
    """
    folder = Path(folder).resolve()
    if not is_store(folder):
        raise CheckpointError(f"{folder} is no parameter store")
    cfg = load_config(folder)
    if not draft:
        cfg = dataclasses.replace(cfg, draft=None)
    params = _restore(folder / _TARGET, param_specs(cfg), sharding_of)
    draft_params = None
    if cfg.draft is not None:
        draft_params = _restore(folder / _DRAFT, draft_specs(cfg), sharding_of)
    return cfg, params, draft_params


def _to_nested(tree: Any, specs: Any) -> dict[str, Any]:
    """The tree as dictionaries, without its empty branches."""
    leaves = {}
    for path, _ in flatten_specs(specs):
        leaf = functools.reduce(getattr, path, tree)
        if isinstance(leaf, Fp8Weight | Fp4Weight):
            leaf = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        leaves[path] = leaf
    return unflatten_dict(leaves)


def _restore(folder: Path, specs: Any, sharding_of: ShardingOf | None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        abstract: dict[tuple[str, ...], Any] = {}
        for path, spec in flatten_specs(specs):
            abstract[path] = _abstract_leaf(path, spec, _find(saved, path, folder), sharding_of)
        restored = checkpointer.restore(folder, unflatten_dict(abstract))
    leaves = [_rebuild(_find(restored, path, folder)) for path, _ in flatten_specs(specs)]
    return jax.tree.unflatten(
        jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, Spec)), leaves
    )


def _find(tree: Any, path: tuple[str, ...], folder: Path) -> Any:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            raise CheckpointError(f"{folder} lacks {'.'.join(path)}")
        tree = tree[key]
    return tree


def _abstract_leaf(
    path: tuple[str, ...], spec: Spec, saved: Any, sharding_of: ShardingOf | None
) -> Any:
    """What to restore for one leaf: dtype as saved, shape checked, sharding as asked."""
    match saved:
        case {"weight": _, "scale": _}:
            scale = spec._replace(shape=fp8_scale_shape(spec.shape))
            parts = {"weight": spec, "scale": scale}
        case {"packed": _, "scale": _}:
            packed = spec._replace(shape=fp4_packed_shape(spec.shape))
            parts = {"packed": packed, "scale": fp4_scale_spec(spec)}
        case _:
            return _abstract(path, spec, saved, sharding_of)
    return {
        name: _abstract((*path, name), part, saved[name], sharding_of)
        for name, part in parts.items()
    }


def _abstract(
    path: tuple[str, ...],
    spec: Spec,
    saved: Any,
    sharding_of: ShardingOf | None,
) -> jax.ShapeDtypeStruct:
    if tuple(saved.shape) != spec.shape:
        raise CheckpointError(
            f"{'.'.join(path)} was saved as {list(saved.shape)}, "
            f"config.json asks for {list(spec.shape)}"
        )
    if sharding_of is None:
        sharding = jnp.zeros(()).sharding  # the default device
    else:
        sharding = sharding_of(spec.axes, spec.shape)
    return jax.ShapeDtypeStruct(spec.shape, saved.dtype, sharding=sharding)


def _rebuild(leaf: Any) -> Any:
    match leaf:
        case {"weight": weight, "scale": scale}:
            return Fp8Weight(weight, scale)
        case {"packed": packed, "scale": scale}:
            return Fp4Weight(packed, scale)
    return leaf
