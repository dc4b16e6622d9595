"""Writing `config.json` in released naming, the inverse of `dspark_jax.config.load_config`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.quantized import FP8_BLOCK

_SAME_NAMES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
    "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk rope_theta "
    "compress_rope_theta max_position_embeddings hc_mult hc_sinkhorn_iters hc_eps n_routed_experts "
    "num_experts_per_tok moe_intermediate_size num_hash_layers routed_scaling_factor swiglu_limit "
    "rms_norm_eps bos_token_id eos_token_id expert_dtype"
).split()
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
_RELEASED_CSA_RATIO = 4


def config_to_dict(cfg: ModelConfig, *, quantized: bool) -> dict[str, Any]:
    """`cfg` as the content of a released `config.json`; `quantized` adds `quantization_config`.

    Two keys are this project's own: `csa_compress_ratio`, only where it isn't 4, and `dspark_num_stages`. Without
    HCA layers there is no place for `hca_ratio`. Raises `CheckpointError` where both ratios are equal, because
    then released naming cannot tell the layers apart.
    """
    if cfg.csa_ratio == cfg.hca_ratio:
        raise CheckpointError(f"csa_ratio and hca_ratio are both {cfg.csa_ratio}")
    ratio_of = {
        AttentionKind.SLIDING: 0,
        AttentionKind.CSA: cfg.csa_ratio,
        AttentionKind.HCA: cfg.hca_ratio,
    }
    ratios = [ratio_of[kind] for kind in cfg.attention_kinds]
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **{name: getattr(cfg, name) for name in _SAME_NAMES},
        # Released files list the drafter's stages after the layers.
        "compress_ratios": ratios + [0] * (cfg.draft.num_stages if cfg.draft else 0),
        "rope_scaling": None,
        **_FIXED,
    }
    if cfg.csa_ratio != _RELEASED_CSA_RATIO:
        config["csa_compress_ratio"] = cfg.csa_ratio
    if cfg.yarn is not None:
        config["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(cfg.yarn)}
    if cfg.draft is not None:
        config |= {
            "dspark_block_size": cfg.draft.block_size,
            "dspark_noise_token_id": cfg.draft.noise_token_id,
            "dspark_target_layer_ids": list(cfg.draft.target_layer_ids),
            "dspark_markov_rank": cfg.draft.markov_rank,
            "dspark_num_stages": cfg.draft.num_stages,
        }
    if quantized:
        config["quantization_config"] = _QUANTIZATION
    return config


def write_config(folder: str | Path, cfg: ModelConfig, *, quantized: bool) -> None:
    """Write `config.json` into `folder`; see `config_to_dict`."""
    text = json.dumps(config_to_dict(cfg, quantized=quantized), indent=2)
    (Path(folder) / "config.json").write_text(text + "\n")
