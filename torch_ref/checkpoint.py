"""Checkpoint folders in the released layout: ``config.json`` and safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_ref.config import TorchRefConfig
from torch_ref.quantization import dequantize_fp4, dequantize_fp8
from torch_ref.random_weights import random_weights

__all__ = ["load_checkpoint", "load_tensors", "random_weights", "save_checkpoint"]


def load_checkpoint(folder: Path) -> tuple[TorchRefConfig, dict[str, Tensor]]:
    """Read configuration and dequantised weights of a checkpoint folder.

    The number of drafter stages is that of the distinct ``mtp.<i>`` prefixes.
    """
    weights = load_tensors(folder)
    stages = {match[1] for name in weights if (match := re.match(r"mtp\.(\d+)\.", name))}
    return TorchRefConfig.from_json(Path(folder) / "config.json", len(stages)), weights


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a folder's safetensors files, dequantised to float32.

    Integer tables are kept as int64. Raises ``FileNotFoundError`` without safetensors files and
    ``ValueError`` for a quantised matrix without scale or a scale without matrix.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    stored: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    scales = {
        name.removesuffix(".scale"): stored.pop(name)
        for name in list(stored)
        if name.endswith(".scale")
    }
    weights = {}
    for name, tensor in stored.items():
        scale = scales.pop(name.removesuffix(".weight"), None)
        weights[name] = _to_float32(name, tensor, scale)
    if scales:
        raise ValueError(f"scales without a matrix: {sorted(scales)[:3]}")
    return weights


def save_checkpoint(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write ``config`` and plain, unquantised ``weights`` as one checkpoint folder.

    Weights may be views of one another; the file holds a copy of each.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _to_float32(name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
    quantised = {torch.float8_e4m3fn: dequantize_fp8, torch.int8: dequantize_fp4}
    if tensor.dtype in quantised:
        if scale is None:
            raise ValueError(f"{name} is {tensor.dtype} but has no scale")
        return quantised[tensor.dtype](tensor, scale)
    if scale is not None:
        raise ValueError(f"{name} is {tensor.dtype} but has a scale")
    return tensor.float() if tensor.is_floating_point() else tensor.long()
