"""Both ways across the frameworks, bit for bit, from released and from Hugging Face names."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import torch

from dspark_jax.checkpoint.load import load_checkpoint
from tests.parity.bridge import to_jax, to_torch
from tests.parity.hf import hf_config, hf_model, to_hf
from tests.torch_ref.configs import tiny_config, tiny_dspark_config
from torch_ref.random_weights import random_weights


def test_there_and_back() -> None:
    reference = tiny_dspark_config()
    weights = random_weights(reference, seed=1)
    cfg, params, draft_params = to_jax(weights, reference.to_released())
    again, back = to_torch(cfg, params, draft_params)
    assert again == reference
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(back[name], tensor), name


def test_joined_and_stacked_leaves() -> None:
    reference = tiny_dspark_config()
    weights = random_weights(reference, seed=2)
    _, params, draft_params = to_jax(weights, reference.to_released())
    for stage, layer in ((None, 2), (1, None)):
        block = params.blocks if stage is None else draft_params.stages
        prefix, i = (f"layers.{layer}", layer) if stage is None else (f"mtp.{stage}", stage)
        for expert, gate_up in (
            ("experts.3", block.w_gate_up[i, 3]),
            ("shared_experts", block.w_shared_gate_up[i]),
        ):
            parts = [weights[f"{prefix}.ffn.{expert}.{name}.weight"] for name in ("w1", "w3")]
            np.testing.assert_array_equal(gate_up, torch.cat(parts))
    np.testing.assert_array_equal(
        params.indexer.w_heads[1], weights["layers.3.attn.indexer.weights_proj.weight"]
    )
    np.testing.assert_array_equal(
        draft_params.w_confidence, weights["mtp.2.confidence_head.proj.weight"]
    )


def test_hugging_face_weights_load_alike(tmp_path: Path) -> None:
    reference = tiny_config()
    weights = random_weights(reference, seed=3)
    expected = to_jax(weights, reference.to_released())
    state = to_jax(to_hf(weights, reference), hf_config(reference).to_dict())
    hf_model(weights, reference).save_pretrained(tmp_path)
    saved = load_checkpoint(tmp_path)
    for cfg, params, draft_params in (state, saved):
        assert cfg == expected[0]
        assert draft_params is None
        jax.tree.map(np.testing.assert_array_equal, params, expected[1])
