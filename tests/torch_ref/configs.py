"""Tiny models for tests: every mechanism, and no ties among indexer scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_ref.config import TorchRefConfig, YarnScaling
from torch_ref.dense_draft import DenseDraftConfig, dense_tensor_shapes


def tiny_config(**overrides: Any) -> TorchRefConfig:
    """Four layers (window only, CSA, HCA, CSA) at ratios 4 and 8, window 8, YaRN from 64.

    The indexer keeps its many heads on purpose: with few, all of their ReLUs are often zero at
    once, scores tie at zero, and which entry is selected is arbitrary.
    """
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "compress_ratios": (0, 4, 8, 4),
        "index_n_heads": 64,
        "index_head_dim": 16,
        "index_topk": 2,
        "rope_scaling": YarnScaling(factor=16.0, original_max_position_embeddings=64),
        "max_position_embeddings": 1024,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 1,
    }
    values |= overrides
    values["num_hidden_layers"] = len(values["compress_ratios"])
    return TorchRefConfig(**values)


def tiny_dspark_config(**overrides: Any) -> TorchRefConfig:
    """As :func:`tiny_config`, with a three-stage drafter of five slots."""
    drafter: dict[str, Any] = {
        "dspark_block_size": 5,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": (1, 2, 3),
        "dspark_markov_rank": 12,
        "dspark_num_stages": 3,
    }
    return tiny_config(**(drafter | overrides))


def dense_config(**overrides: Any) -> DenseDraftConfig:
    """Two Qwen3-style layers, seven slots, features of target layers 0 and 2."""
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "block_size": 7,
        "mask_token_id": 3,
        "target_layer_ids": (0, 2),
        "markov_rank": 12,
    }
    return DenseDraftConfig(**(values | overrides))


def dense_weights(cfg: DenseDraftConfig, seed: int) -> dict[str, Tensor]:
    """Random weights of a dense drafter, norms near one and biases not zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in dense_tensor_shapes(cfg):
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "norm" in name else noise * shape[-1] ** -0.5
    return weights


def random_features(count: int, width: int, seed: int) -> Tensor:
    """Stand-in for target features, ``[count, width]``."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Root-mean-square norm written out."""
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
