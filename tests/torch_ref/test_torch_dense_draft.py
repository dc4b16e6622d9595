"""The DeepSpec drafter against transformers' Qwen3, and the sequential heads written out."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.parity.compare import FLOAT32_MODEL, assert_close
from tests.torch_ref.configs import dense_config, dense_weights, normed, random_features
from torch_ref.dense_draft import DenseDraftConfig, DenseDrafter, dense_block, dense_context
from torch_ref.heads import MARKOV_KINDS, sample_sequentially
from torch_ref.scope import Scope


@pytest.mark.parametrize("num_committed", [0, 1, 30])
def test_dense_block_equals_qwen3_of_transformers(num_committed):
    """Its layers are Qwen3's, over a cache that holds the context and under no mask."""
    cfg = dense_config()
    weights = dense_weights(cfg, 1)
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            num_hidden_layers=cfg.num_hidden_layers,
            num_attention_heads=cfg.num_attention_heads,
            num_key_value_heads=cfg.num_key_value_heads,
            head_dim=cfg.head_dim,
            rms_norm_eps=cfg.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
            attn_implementation="eager",
        )
    ).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    features = random_features(num_committed, 2 * cfg.hidden_size, 2)
    cache = DynamicCache()
    if num_committed:
        hidden = normed(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])[None]
        cos, sin = model.rotary_emb(hidden, torch.arange(num_committed)[None])
        for index, layer in enumerate(model.layers):
            attn, shape = layer.self_attn, (1, num_committed, -1, cfg.head_dim)
            keys = attn.k_norm(attn.k_proj(hidden).view(shape)).transpose(1, 2)
            values = attn.v_proj(hidden).view(shape).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[1], values, index)
    size = cfg.block_size
    with torch.no_grad():
        expected = model(
            torch.tensor([[9, *[cfg.mask_token_id] * (size - 1)]]),
            position_ids=torch.arange(num_committed, num_committed + size)[None],
            attention_mask=torch.zeros(1, 1, size, num_committed + size),
            cache=cache,
        ).last_hidden_state[0]
    scope = Scope(weights)
    context = dense_context(scope, cfg, features, torch.arange(num_committed))
    hidden = dense_block(scope, cfg, context, 9, num_committed)
    assert_close(hidden, expected, FLOAT32_MODEL)

    drafter = DenseDrafter(weights, cfg)
    for piece in features.split(4):
        drafter.extend(piece)
    proposal = drafter.propose(9)
    previous = [9, *proposal.tokens[:-1].tolist()]
    embedded = weights["markov_head.markov_w1.weight"][previous]
    base = expected @ weights["lm_head.weight"].T
    logits = base + embedded @ weights["markov_head.markov_w2.weight"].T
    assert_close(proposal.logits, logits, FLOAT32_MODEL)
    both = torch.cat([expected, embedded], -1) @ weights["confidence_head.proj.weight"][0]
    confidences = torch.sigmoid(both + weights["confidence_head.proj.bias"])
    assert_close(proposal.confidences, confidences, FLOAT32_MODEL)


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_markov_heads_written_out(kind):
    cfg = dense_config(markov_head_type=kind)
    w = {
        name.removeprefix("markov_head."): tensor
        for name, tensor in dense_weights(cfg, 3).items()
        if name.startswith("markov_head.")
    }
    hidden = random_features(7, cfg.hidden_size, 4)
    base = random_features(7, cfg.vocab_size, 5)
    drawn = [11, 12, 13, 14, 15, 16, 17]
    tokens, logits = sample_sequentially(
        Scope(w), kind, base, hidden, 10, lambda slot, _: drawn[slot]
    )
    assert tokens.tolist() == drawn
    rank = cfg.markov_rank
    state = torch.zeros(rank)
    for slot, before in enumerate([10, *drawn[:-1]]):
        feature = w["markov_w1.weight"][before]
        if kind == "gated":
            weight, bias = w["gate_proj.weight"], w["gate_proj.bias"]
            gate = weight[:, :48] @ hidden[slot] + weight[:, 48:] @ feature + bias
            feature = feature / (1 + (-gate).exp())
        if kind == "rnn":
            joint = w["joint_proj.weight"]
            z = joint[:, :rank] @ state + joint[:, rank : 2 * rank] @ feature
            z = z + joint[:, 2 * rank :] @ hidden[slot] + w["joint_proj.bias"]
            keep = 1 / (1 + (-z[:rank]).exp())
            feature = z[2 * rank :].tanh()
            state = keep * state + (1 - keep) * z[rank : 2 * rank].tanh()
        expected = base[slot] + w["markov_w2.weight"] @ feature
        assert_close(logits[slot], expected, FLOAT32_MODEL, f"slot {slot}")


def test_dense_config_reads_released_fields():
    cfg = dense_config()
    released = vars(cfg) | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [0, 2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_target_layers": 36,
    }
    del released["rope_theta"]
    assert DenseDraftConfig.from_dict(released) == cfg
    with pytest.raises(ValueError, match="must increase"):
        dense_config(target_layer_ids=(2, 0))
    with pytest.raises(ValueError, match="'lstm'"):
        dense_config(markov_head_type="lstm")
