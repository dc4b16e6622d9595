"""The table: published counts, names that others list independently, and every element filled once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from dspark_jax.checkpoint.names import (
    Entry,
    Naming,
    count_stages,
    detect_naming,
    draft_entries,
    flatten_specs,
    plain_mtp_names,
    target_entries,
)
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import ConfigError, ModelConfig, config_from_dict
from dspark_jax.draft.params import draft_specs
from dspark_jax.model.params import param_specs
from tests.checkpoint.tiny import RAW, tiny_config
from tests.parity.hf import hf_config
from torch_ref.config import TorchRefConfig
from torch_ref.random_weights import tensor_shapes

FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0] * 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return config_from_dict(FLASH)


def released_names(entries: list[Entry]) -> list[str]:
    """Tensor names of a released file, scales included."""
    required = [entry for entry in entries if not entry.optional]
    return [e.name for e in required] + [e.scale_name for e in required if e.is_quantizable]


def test_flash_has_its_published_number_of_tensors(flash: ModelConfig) -> None:
    target = released_names(target_entries(flash))
    assert len(target) == 43 * 1565 + 21 * 11 + 20 * 4 + 6
    drafter = released_names(draft_entries(flash))
    assert len(drafter) == 4705
    block = plain_mtp_names(flash)
    assert len(block) == 1575
    assert len({*target, *block}) == 69187
    assert len({*target, *drafter}) == len(target) + len(drafter)


def test_flash_shapes(flash: ModelConfig) -> None:
    entries = {entry.name: entry for entry in target_entries(flash) + draft_entries(flash)}
    assert entries["layers.2.attn.wq_b.weight"].shape == (32768, 1024)
    assert entries["layers.2.attn.wo_a.weight"].shape == (8192, 4096)
    assert entries["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert entries["layers.3.attn.compressor.ape"].shape == (128, 512)
    assert entries["layers.0.ffn.gate.tid2eid"].shape == (129280, 6)
    assert entries["mtp.0.main_proj.weight"].shape == (4096, 12288)
    assert entries["mtp.2.confidence_head.proj.weight"].shape == (1, 4352)
    w3 = entries["layers.7.ffn.experts.9.w3.weight"]
    assert (w3.shape, w3.index, w3.rows) == ((2048, 4096), (7, 9), slice(2048, 4096))
    # Compressors are stacked over the layers that have one: layer 7 is the third HCA layer.
    w_gate = entries["layers.7.attn.compressor.wgate.weight"]
    assert (w_gate.path, w_gate.index) == (("hca", "w_kv_gate"), (2,))
    assert (w_gate.shape, w_gate.rows) == ((512, 4096), slice(512, 1024))
    assert "layers.2.ffn.gate.bias" not in entries
    assert "layers.3.ffn.gate.tid2eid" not in entries


def test_names_and_shapes_equal_the_reference_inventory() -> None:
    expected = dict(tensor_shapes(TorchRefConfig.from_dict(RAW)))
    cfg = tiny_config()
    entries = [e for e in target_entries(cfg) + draft_entries(cfg) if not e.optional]
    assert {entry.name: entry.shape for entry in entries} == expected
    assert len(entries) == len(expected)


def test_hugging_face_names_and_shapes_equal_its_state_dict() -> None:
    raw = {key: value for key, value in RAW.items() if not key.startswith("dspark")}
    reference = TorchRefConfig.from_dict(raw)
    with torch.device("meta"):
        state = DeepseekV4ForCausalLM(hf_config(reference)).state_dict()
    entries = target_entries(config_from_dict(raw), Naming.HUGGING_FACE)
    assert {e.name: e.shape for e in entries} == {n: tuple(t.shape) for n, t in state.items()}
    assert detect_naming(state) is Naming.HUGGING_FACE


@pytest.mark.parametrize("naming", Naming)
def test_every_element_of_the_target_is_filled_once(naming: Naming) -> None:
    cfg = tiny_config()
    specs = dict(flatten_specs(param_specs(cfg)))
    counts = count_fills(specs, target_entries(cfg, naming))
    for path, count in counts.items():
        expected = np.ones_like(count)
        if path == ("blocks", "b_router"):
            expected[: cfg.num_hash_layers] = 0
        np.testing.assert_array_equal(count, expected, err_msg=".".join(path))


def test_every_element_of_the_drafter_is_filled_once() -> None:
    cfg = tiny_config()
    counts = count_fills(dict(flatten_specs(draft_specs(cfg))), draft_entries(cfg))
    for path, count in counts.items():
        assert (count == 1).all(), path


def count_fills(specs: dict[tuple[str, ...], Any], entries: list[Entry]) -> dict[Any, np.ndarray]:
    counts = {path: np.zeros(spec.shape, int) for path, spec in specs.items()}
    for entry in entries:
        part = counts[entry.path][entry.index][entry.rows]
        assert part.shape == entry.shape, entry
        part += 1
    return counts


def test_paths_lead_to_the_fields_of_the_trees() -> None:
    cfg = tiny_config()
    for specs, entries in (
        (param_specs(cfg), target_entries(cfg)),
        (draft_specs(cfg), draft_entries(cfg)),
    ):
        for entry in entries:
            assert functools.reduce(getattr, entry.path, specs).storage == entry.storage


def test_markov_w1_is_no_expert_matrix() -> None:
    entries = {entry.name: entry for entry in draft_entries(tiny_config())}
    markov = entries["mtp.1.markov_head.markov_w1.weight"]
    assert (markov.path, markov.shape, markov.rows) == (("markov_w1",), (96, 8), slice(None))
    assert not markov.is_quantizable
    owners = {e.path for n, e in entries.items() if n.endswith(".w1.weight")}
    assert owners == {("stages", "w_gate_up"), ("stages", "w_shared_gate_up")}


def test_scales_are_called_scale_for_every_format() -> None:
    entries = {entry.name: entry for entry in target_entries(tiny_config())}
    for name in ("attn.wo_a", "ffn.shared_experts.w2", "ffn.experts.0.w1"):
        entry = entries[f"layers.0.{name}.weight"]
        assert entry.is_quantizable
        assert entry.scale_name == f"layers.0.{name}.scale"


def test_stages_are_counted_by_their_prefix() -> None:
    assert count_stages(["mtp.0.x", "mtp.2.x", "layers.9.mtp.8.x", "mtpx.7.y"]) == 3
    assert count_stages(["layers.0.x"]) == 0


def test_the_last_stage_carries_the_heads() -> None:
    cfg = tiny_config()
    assert cfg.draft is not None
    three = dataclasses.replace(cfg, draft=dataclasses.replace(cfg.draft, num_stages=3))
    names = {entry.name for entry in draft_entries(three)}
    assert "mtp.2.markov_head.markov_w2.weight" in names
    assert "mtp.1.markov_head.markov_w2.weight" not in names
    assert "mtp.0.main_norm.weight" in names


def test_a_target_alone_has_no_drafter_tensors() -> None:
    with pytest.raises(ConfigError, match="no DSpark drafter"):
        draft_entries(dataclasses.replace(tiny_config(), draft=None))


def test_foreign_names_are_named() -> None:
    with pytest.raises(CheckpointError, match="no DeepSeek-V4 tensor names: a, b"):
        detect_naming(["b", "a"])
    with pytest.raises(CheckpointError, match="no tensors"):
        detect_naming([])
