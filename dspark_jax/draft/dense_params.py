"""The DSpark drafter in DeepSpec's layout: its configuration and parameters.

DeepSpec (deepseek-ai/DeepSpec) trains drafters of Qwen3-style layers beside any target and publishes them on their
own, with copies of the target's embedding and output head.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

from dspark_jax.config import ConfigError
from dspark_jax.model.params import leaf_spec


class MarkovKind(enum.Enum):
    """How the transition logits follow from the token before (DSpark, section on the sequential head)."""

    VANILLA = "vanilla"  # W2 W1[x]
    GATED = "gated"  # W2 (sigmoid(W_gate [h; W1[x]] + b) * W1[x])
    RNN = "rnn"  # W2 tanh(out) of a gated recurrence over the block


@dataclass(frozen=True, kw_only=True)
class DenseDraftConfig:
    """Shape of a DeepSpec drafter; fields keep the names of its `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head_type: MarkovKind = MarkovKind.VANILLA
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)):
            raise ConfigError(f"target_layer_ids must be increasing, got {list(ids)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")


class DenseLayer(struct.PyTreeNode):
    """Qwen3 layers, stacked."""

    g_attn: jax.Array  # [L, M]
    g_mlp: jax.Array  # [L, M]
    w_q: jax.Array  # [L, H*D, M]
    w_k: jax.Array  # [L, KV*D, M]
    w_v: jax.Array  # [L, KV*D, M]
    w_o: jax.Array  # [L, M, H*D]
    g_q: jax.Array  # [L, D]
    g_k: jax.Array  # [L, D]
    w_gate: jax.Array  # [L, F, M]
    w_up: jax.Array  # [L, F, M]
    w_down: jax.Array  # [L, M, F]


class Affine(struct.PyTreeNode):
    """A linear map with a bias."""

    w: jax.Array  # [N, K]
    b: jax.Array  # [N]


class MarkovHead(struct.PyTreeNode):
    """Transition logits; `mix` is the gate or the recurrence of the kinds that have one."""

    w1: jax.Array  # [V, r]
    w2: jax.Array  # [V, r]
    mix: Affine | None  # gated: [r, M + r]; rnn: [3r, 2r + M]


class DenseDraftParams(struct.PyTreeNode):
    """A whole DeepSpec drafter."""

    embed: jax.Array  # [V, M]
    head: jax.Array  # [V, M]
    w_context: jax.Array  # [M, taps*M]
    g_context: jax.Array  # [M]
    g_norm: jax.Array  # [M]
    layers: DenseLayer
    markov: MarkovHead
    confidence: Affine | None  # [1, M + r], or [1, M] without the Markov row


_ARCHITECTURE = "Qwen3DSparkModel"


def dense_config_from_dict(raw: Mapping[str, Any]) -> DenseDraftConfig:
    """Read the parsed `config.json` of a DeepSpec drafter.

    Raises `ConfigError` for a missing field and for what this layout's layers do not do: other architectures,
    windowed layers, biases, scaled rotary tables, and drafters that do not predict from the anchor's own place.
    """
    architectures = raw.get("architectures", [_ARCHITECTURE])
    if architectures != [_ARCHITECTURE]:
        raise ConfigError(
            f"architectures {architectures} is not supported; only {_ARCHITECTURE} is"
        )
    only = {"attention_bias": False, "hidden_act": "silu", "sample_from_anchor": True}
    for name, value in only.items():
        if raw.get(name, value) != value:
            raise ConfigError(f"{name} {raw[name]!r} is not supported; only {value!r} is")
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(f"layer_types {sorted(kinds)} are not supported; only full_attention is")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError(f"rope scaling {rope} is not supported")
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim block_size mask_token_id markov_rank"
    ).split()
    optional = "rms_norm_eps enable_confidence_head confidence_head_with_markov".split()
    kind = raw.get("markov_head_type", MarkovKind.VANILLA.value)
    if kind not in {known.value for known in MarkovKind}:
        raise ConfigError(f"markov_head_type {kind!r} is none of {[k.value for k in MarkovKind]}")
    try:
        return DenseDraftConfig(
            **{name: raw[name] for name in same},
            **{name: raw[name] for name in optional if name in raw},
            rope_theta=rope["rope_theta"] if "rope_theta" in rope else raw["rope_theta"],
            target_layer_ids=tuple(raw["target_layer_ids"]),
            markov_head_type=MarkovKind(kind),
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]!r}") from error


def dense_draft_specs(cfg: DenseDraftConfig) -> DenseDraftParams:
    """Specifications of the drafter, in the structure of `DenseDraftParams`. Nothing is sharded."""
    m, v, r, f = cfg.hidden_size, cfg.vocab_size, cfg.markov_rank, cfg.intermediate_size
    heads, kv_heads, d = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim

    def leaf(*shape: int, init: str = "matrix") -> Any:
        return leaf_spec(shape, (None,) * len(shape), "bf16", init)

    def stack(*shape: int, init: str = "matrix") -> Any:
        return leaf(cfg.num_hidden_layers, *shape, init=init)

    def affine(out: int, width: int) -> Affine:
        return Affine(w=leaf(out, width), b=leaf(out, init="zero"))

    mix = {
        MarkovKind.VANILLA: None,
        MarkovKind.GATED: affine(r, m + r),
        MarkovKind.RNN: affine(3 * r, 2 * r + m),
    }[cfg.markov_head_type]
    width = m + r if cfg.confidence_head_with_markov else m
    return DenseDraftParams(
        embed=leaf(v, m),
        head=leaf(v, m),
        w_context=leaf(m, len(cfg.target_layer_ids) * m),
        g_context=leaf(m, init="one"),
        g_norm=leaf(m, init="one"),
        layers=DenseLayer(
            g_attn=stack(m, init="one"),
            g_mlp=stack(m, init="one"),
            w_q=stack(heads * d, m),
            w_k=stack(kv_heads * d, m),
            w_v=stack(kv_heads * d, m),
            w_o=stack(m, heads * d),
            g_q=stack(d, init="one"),
            g_k=stack(d, init="one"),
            w_gate=stack(f, m),
            w_up=stack(f, m),
            w_down=stack(m, f),
        ),
        markov=MarkovHead(w1=leaf(v, r), w2=leaf(v, r), mix=mix),
        confidence=affine(1, width) if cfg.enable_confidence_head else None,
    )
