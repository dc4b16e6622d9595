"""Weights across frameworks: always through a checkpoint folder, so that the production loader is used.

A folder is written by one package and read by the other; the two share no code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.config import ModelConfig
from dspark_jax.draft.params import DraftParams
from dspark_jax.model.params import Params
from torch_ref.checkpoint import load_checkpoint as load_torch
from torch_ref.checkpoint import save_checkpoint
from torch_ref.config import TorchRefConfig


def to_jax(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], **options: Any
) -> tuple[ModelConfig, Params, DraftParams | None]:
    """Give PyTorch `weights` and the content of a `config.json` to the JAX loader.

    Names may be released ones or those of a Hugging Face state_dict. `options` go to `load_checkpoint`; the
    default is float32, bit for bit.
    """
    # A file holds no views: tensors that share memory are copied apart.
    separate = {name: tensor.detach().clone() for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, separate, config)
        return load_checkpoint(folder, **options)


def to_torch(
    cfg: ModelConfig, params: Params, draft_params: DraftParams | None
) -> tuple[TorchRefConfig, dict[str, torch.Tensor]]:
    """Give JAX parameters to the PyTorch reference, as float32 and int64 tensors of released names."""
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(folder, cfg, params, draft_params, quantize=False)
        return load_torch(folder)
