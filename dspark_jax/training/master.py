"""Trained parameters as plain bfloat16 arrays, so that they can be rounded again without training again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

_PART_BYTES = 15 << 20


def save_master(folder: Path, tree: Any) -> None:
    """Write the leaves of a tree as `master_<n>.npz`, each at most 15 MiB, floats as bfloat16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(leaf)
        if np.issubdtype(value.dtype, np.floating):
            value = value.astype(ml_dtypes.bfloat16).view(np.uint16)
        size += value.nbytes
        if size > _PART_BYTES:
            parts.append({})
            size = value.nbytes
        parts[-1][jax.tree_util.keystr(path)] = value
    for n, part in enumerate(parts):
        np.savez(folder / f"master_{n}.npz", **part)


def load_master(folder: Path, abstract: Any) -> Any:
    """Read what `save_master` wrote into the structure of `abstract`, floats as float32."""
    stored: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("master_*.npz")):
        with np.load(path) as part:
            stored.update(part)

    def restore(path: Any, leaf: Any) -> jax.Array:
        value = stored[jax.tree_util.keystr(path)]
        if value.dtype == np.uint16:
            value = value.view(ml_dtypes.bfloat16).astype(np.float32)
        if value.shape != leaf.shape:
            raise ValueError(f"{path} is {value.shape} in {folder}, expected {leaf.shape}")
        return jax.numpy.asarray(value)

    return jax.tree_util.tree_map_with_path(restore, abstract)
