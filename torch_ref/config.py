"""Configuration of the reference, read from released or Hugging Face ``config.json`` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"

_FIXED = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN stretching of the rotary table used by layers with a compressor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TorchRefConfig:
    """Shape and constants of one DeepSeek-V4 model, with its DSpark drafter if it has one.

    ``compress_ratios`` holds one entry per trunk layer: 0 is a layer with only the sliding
    window, ``csa_compress_ratio`` a CSA layer, and any other value an HCA layer.
    ``dspark_num_stages`` is 0 for a model without a drafter.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    csa_compress_ratio: int = 4
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: YarnScaling | None = None
    max_position_embeddings: int = 1048576
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_num_stages: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError``, naming the value, where fields contradict each other."""
        if len(self.compress_ratios) != self.num_hidden_layers:
            raise ValueError(
                f"compress_ratios has {len(self.compress_ratios)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        if min(self.compress_ratios) < 0 or self.csa_compress_ratio < 1:
            raise ValueError(f"negative ratio in {self.compress_ratios}, {self.csa_compress_ratio}")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"o_groups={self.o_groups} does not divide {self.num_attention_heads} heads"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > min(
            self.head_dim, self.index_head_dim
        ):
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and fit in head_dim="
                f"{self.head_dim} and index_head_dim={self.index_head_dim}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts="
                f"{self.n_routed_experts}"
            )
        if self.dspark_num_stages and not (
            self.dspark_block_size and self.dspark_target_layer_ids and self.dspark_markov_rank
        ):
            raise ValueError("dspark_num_stages is set but a dspark_* field is missing")
        if any(not 0 <= i < self.num_hidden_layers for i in self.dspark_target_layer_ids):
            raise ValueError(f"dspark_target_layer_ids {self.dspark_target_layer_ids} out of range")

    def layer_type(self, layer: int) -> str:
        """Attention kind of a trunk layer: ``SLIDING``, ``CSA`` or ``HCA``."""
        ratio = self.compress_ratios[layer]
        if ratio == 0:
            return SLIDING
        return CSA if ratio == self.csa_compress_ratio else HCA

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], num_stages: int | None = None) -> TorchRefConfig:
        """Read a parsed ``config.json`` in released or Hugging Face naming.

        ``num_stages`` is the number of drafter stages found in the weights; released files do
        not state it. The extra key ``dspark_num_stages`` is used when it is not given. Raises
        ``ValueError`` for a feature the architecture does not have and ``KeyError`` for a
        missing field.
        """
        for key, value in _FIXED.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key}={config[key]!r} is not supported, only {value!r}")
        num_layers = config["num_hidden_layers"]
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in config.items() if key in known}
        if "layer_types" in config:
            values |= _from_hugging_face(config)
        else:
            values["compress_ratios"] = tuple(config["compress_ratios"][:num_layers])
            values["rope_scaling"] = _yarn(config.get("rope_scaling"))
        if num_stages is None:
            num_stages = config.get("dspark_num_stages", 0)
        values["dspark_num_stages"] = num_stages if config.get("dspark_block_size") else 0
        values["dspark_target_layer_ids"] = tuple(config.get("dspark_target_layer_ids", ()))
        return cls(**values)

    @classmethod
    def from_json(cls, path: Path, num_stages: int | None = None) -> TorchRefConfig:
        """Read a ``config.json`` file; see :meth:`from_dict`."""
        return cls.from_dict(json.loads(Path(path).read_text()), num_stages)

    def to_released(self) -> dict[str, Any]:
        """Return the ``config.json`` content in released naming.

        Like the released files it lists a zero ratio per drafter stage after the trunk layers.
        The two keys that released files lack, ``csa_compress_ratio`` and ``dspark_num_stages``,
        are written only where they are needed to read the file back.
        """
        config = {field.name: getattr(self, field.name) for field in fields(self)}
        config["compress_ratios"] = [*self.compress_ratios, *[0] * self.dspark_num_stages]
        config["dspark_target_layer_ids"] = list(self.dspark_target_layer_ids)
        config["rope_scaling"] = None
        if self.rope_scaling is not None:
            config["rope_scaling"] = {"type": "yarn", **vars(self.rope_scaling)}
        if self.csa_compress_ratio == 4:
            del config["csa_compress_ratio"]
        if self.dspark_num_stages == 0:
            config = {key: v for key, v in config.items() if not key.startswith("dspark_")}
        return {
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
            **_FIXED,
            **config,
        }


def _yarn(scaling: Mapping[str, Any] | None) -> YarnScaling | None:
    if scaling is None:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope scaling type {kind!r} is not supported, only 'yarn'")
    if scaling.get("attention_factor", 1.0) != 1.0:
        raise ValueError(f"attention_factor={scaling['attention_factor']}: DeepSeek-V4 has none")
    known = {field.name for field in fields(YarnScaling)}
    return YarnScaling(**{key: value for key, value in scaling.items() if key in known})


def _from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the fields that Hugging Face transformers 5 names differently."""
    num_layers = config["num_hidden_layers"]
    rates = {SLIDING: 0, CSA: 4, HCA: 128, **(config.get("compress_rates") or {})}
    mlp_types = list(config["mlp_layer_types"][:num_layers])
    num_hash_layers = mlp_types.count("hash_moe")
    if mlp_types != ["hash_moe"] * num_hash_layers + ["moe"] * (num_layers - num_hash_layers):
        raise ValueError(f"hash layers must come first, got mlp_layer_types={mlp_types}")
    if rates[CSA] == rates[HCA]:
        raise ValueError(f"CSA and HCA layers share the ratio {rates[CSA]}")
    main, compress = config["rope_parameters"]["main"], config["rope_parameters"]["compress"]
    return {
        "compress_ratios": tuple(rates[kind] for kind in config["layer_types"][:num_layers]),
        "csa_compress_ratio": rates[CSA],
        "num_hash_layers": num_hash_layers,
        "qk_rope_head_dim": round(config["head_dim"] * config["partial_rotary_factor"]),
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_scaling": _yarn(compress),
    }
