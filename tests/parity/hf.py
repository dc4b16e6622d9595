"""DeepSeek-V4 of Hugging Face transformers as an oracle: configuration, names, model.

The published checkpoint names differ from transformers' module names; this module holds the
correspondence, so that one set of weights can be given to both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from torch_ref.config import CSA, HCA, TorchRefConfig

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}


def hf_config(cfg: TorchRefConfig) -> DeepseekV4Config:
    """Configuration of the same trunk; ratios of both compressed kinds must be unique."""
    hca_ratios = {ratio for ratio in cfg.compress_ratios if ratio} - {cfg.csa_compress_ratio}
    if len(hca_ratios) > 1:
        raise ValueError(f"transformers knows one HCA ratio, not {sorted(hca_ratios)}")
    rates = {CSA: cfg.csa_compress_ratio, HCA: hca_ratios.pop() if hca_ratios else 128}
    scaling = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        scaling = {"rope_type": "yarn", **vars(cfg.rope_scaling)}
    hashed = cfg.num_hash_layers
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank "
        "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk rope_theta "
        "compress_rope_theta max_position_embeddings hc_mult hc_sinkhorn_iters hc_eps "
        "n_routed_experts num_experts_per_tok moe_intermediate_size routed_scaling_factor "
        "swiglu_limit rms_norm_eps bos_token_id eos_token_id"
    )
    return DeepseekV4Config(
        **{name: getattr(cfg, name) for name in same.split()},
        num_key_value_heads=1,
        pad_token_id=None,
        partial_rotary_factor=cfg.qk_rope_head_dim / cfg.head_dim,
        layer_types=[cfg.layer_type(layer) for layer in range(cfg.num_hidden_layers)],
        compress_rates=rates,
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (cfg.num_hidden_layers - hashed),
        rope_parameters=scaling,
    )


def to_hf(weights: Mapping[str, Tensor], cfg: TorchRefConfig) -> dict[str, Tensor]:
    """Rename trunk weights to transformers' state dictionary, experts stacked; no ``mtp.*``."""
    state = {theirs: weights[ours] for ours, theirs in _TOP.items()}
    for layer in range(cfg.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, other in _LAYER.items():
            if f"{ours}.{name}" in weights:
                state[f"{theirs}.{other}"] = weights[f"{ours}.{name}"]
        w1, w2, w3 = (
            torch.stack(
                [
                    weights[f"{ours}.ffn.experts.{expert}.{name}.weight"]
                    for expert in range(cfg.n_routed_experts)
                ]
            )
            for name in ("w1", "w2", "w3")
        )
        state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        state[f"{theirs}.mlp.experts.down_proj"] = w2
    return state


def from_hf(state: Mapping[str, Tensor], cfg: TorchRefConfig) -> dict[str, Tensor]:
    """Inverse of :func:`to_hf`."""
    weights = {ours: state[theirs] for ours, theirs in _TOP.items()}
    for layer in range(cfg.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, other in _LAYER.items():
            if f"{theirs}.{other}" in state:
                weights[f"{ours}.{name}"] = state[f"{theirs}.{other}"]
        w1, w3 = state[f"{theirs}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
        stacked = {"w1": w1, "w2": state[f"{theirs}.mlp.experts.down_proj"], "w3": w3}
        for name, tensor in stacked.items():
            for expert in range(cfg.n_routed_experts):
                weights[f"{ours}.ffn.experts.{expert}.{name}.weight"] = tensor[expert]
    return weights


def hf_model(weights: Mapping[str, Tensor], cfg: TorchRefConfig) -> DeepseekV4ForCausalLM:
    """Build transformers' float32 model holding exactly ``weights``; a missing one raises."""
    model = DeepseekV4ForCausalLM(hf_config(cfg)).float().eval()
    model.load_state_dict(to_hf(weights, cfg), strict=True)
    return model
