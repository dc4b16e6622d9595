"""The reference trunk against Hugging Face transformers, float32, same weights."""

from __future__ import annotations

import pytest
import torch

from tests.parity.compare import EXACT, FLOAT32_MODEL, assert_close
from tests.parity.hf import from_hf, hf_config, hf_model, to_hf
from tests.torch_ref.configs import tiny_config
from torch_ref.config import TorchRefConfig
from torch_ref.layers import largest_first
from torch_ref.model import forward, forward_with_states
from torch_ref.random_weights import random_weights

CONFIGS = {
    "every kind of layer": {},
    "clamp bites, three picks": {"swiglu_limit": 0.3, "index_topk": 3},
    "schedule of Pro, all hashed": {"compress_ratios": (8, 8, 4, 8, 4), "num_hash_layers": 5},
    "schedule of Flash": {"compress_ratios": (0, 0, 4, 8, 4), "num_hash_layers": 0},
    "window only": {"compress_ratios": (0, 0), "sliding_window": 5},
    "compressed table without YaRN": {"rope_scaling": None},
    "CSA at 2, HCA at 16": {"compress_ratios": (2, 16, 2), "csa_compress_ratio": 2},
    "more picks than entries": {"index_topk": 100},
    "two streams, three Sinkhorn rounds": {"hc_mult": 2, "hc_sinkhorn_iters": 3},
    "whole head rotates": {"head_dim": 16, "qk_rope_head_dim": 16},
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_states_equal_transformers(overrides):
    cfg = tiny_config(**overrides)
    weights = random_weights(cfg, seed=1)
    token_ids = torch.randint(cfg.vocab_size, (2, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = hf_model(weights, cfg)(token_ids, use_cache=False, output_hidden_states=True)
    logits, states = forward_with_states(weights, cfg, token_ids)
    assert_close(logits, expected.logits, FLOAT32_MODEL, "logits")
    # transformers' last hidden state is collapsed and normed, so it is no stream state.
    for layer, state in enumerate(expected.hidden_states[:-1]):
        assert_close(states[layer], state, FLOAT32_MODEL, f"streams below layer {layer}")


def test_every_parameter_matters():
    cfg = tiny_config(compress_ratios=(4, 8), num_hash_layers=1)
    weights = random_weights(cfg, 0)
    token_ids = torch.arange(36)[None]
    logits = forward(weights, cfg, token_ids)
    for name, tensor in weights.items():
        if name.endswith("tid2eid"):
            changed = tensor.flip(0)
        else:
            changed = tensor + 0.3 * torch.randn(
                tensor.shape, generator=torch.Generator().manual_seed(1)
            )
        moved = (forward(weights | {name: changed}, cfg, token_ids) - logits).abs().max()
        assert moved > 1e-5, f"{name} has no effect on the logits"


def test_names_are_those_of_the_model_and_invert():
    cfg = tiny_config()
    weights = random_weights(cfg, 0)
    state = to_hf(weights, cfg)
    assert state.keys() == hf_model(weights, cfg).state_dict().keys()
    back = from_hf(state, cfg)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert_close(back[name], tensor, EXACT, name)


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_configuration_reads_back_from_transformers(overrides):
    cfg = tiny_config(**overrides)
    assert TorchRefConfig.from_dict(hf_config(cfg).to_dict()) == cfg


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([1.0, 2.0] * 50)
    assert largest_first(scores, 3).tolist() == [1, 3, 5]
    assert largest_first(torch.zeros(2, 1000), 4).tolist() == [[0, 1, 2, 3]] * 2
