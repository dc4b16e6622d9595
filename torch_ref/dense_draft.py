"""The DSpark drafter in DeepSpec's layout: dense Qwen3-style layers beside any target.

It differs from the V4 drafter in its layers (grouped-query attention over the whole context,
half-split rotary embedding, plain residuals), in carrying its own embedding and output head, and
in the confidence head, which reads the final-normed hidden state and has a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_ref.heads import (
    MARKOV_KINDS,
    Choose,
    Proposal,
    choose_greedy,
    confidences,
    sample_sequentially,
)
from torch_ref.layers import rms_norm
from torch_ref.scope import Scope


@dataclass(frozen=True, kw_only=True)
class DenseDraftConfig:
    """Shape of a DeepSpec drafter, in the names of its ``config.json``."""

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
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        """Raise ``ValueError`` on an unknown head or target layers that do not increase."""
        if self.markov_head_type not in MARKOV_KINDS:
            raise ValueError(f"markov_head_type={self.markov_head_type!r}, not {MARKOV_KINDS}")
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise ValueError(f"target_layer_ids {self.target_layer_ids} must increase")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DenseDraftConfig:
        """Read a parsed ``config.json``; the rotary base may be nested in ``rope_parameters``."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in config.items() if key in known}
        if "rope_parameters" in config:
            values["rope_theta"] = config["rope_parameters"]["rope_theta"]
        values["target_layer_ids"] = tuple(config["target_layer_ids"])
        return cls(**values)


def dense_tensor_shapes(cfg: DenseDraftConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield published name and shape of every tensor."""
    dim, rank, mlp = cfg.hidden_size, cfg.markov_rank, cfg.intermediate_size
    q_width = cfg.num_attention_heads * cfg.head_dim
    kv_width = cfg.num_key_value_heads * cfg.head_dim
    yield "embed_tokens.weight", (cfg.vocab_size, dim)
    yield "lm_head.weight", (cfg.vocab_size, dim)
    yield "fc.weight", (dim, len(cfg.target_layer_ids) * dim)
    yield "hidden_norm.weight", (dim,)
    yield "norm.weight", (dim,)
    for layer in range(cfg.num_hidden_layers):
        prefix = f"layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (dim,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_width, dim)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_width, dim)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_width, dim)
        yield f"{prefix}.self_attn.o_proj.weight", (dim, q_width)
        yield f"{prefix}.self_attn.q_norm.weight", (cfg.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (cfg.head_dim,)
        yield f"{prefix}.mlp.gate_proj.weight", (mlp, dim)
        yield f"{prefix}.mlp.up_proj.weight", (mlp, dim)
        yield f"{prefix}.mlp.down_proj.weight", (dim, mlp)
    yield "markov_head.markov_w1.weight", (cfg.vocab_size, rank)
    yield "markov_head.markov_w2.weight", (cfg.vocab_size, rank)
    if cfg.markov_head_type == "gated":
        yield "markov_head.gate_proj.weight", (rank, dim + rank)
        yield "markov_head.gate_proj.bias", (rank,)
    if cfg.markov_head_type == "rnn":
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + dim)
        yield "markov_head.joint_proj.bias", (3 * rank,)
    if cfg.enable_confidence_head:
        width = dim + rank if cfg.confidence_head_with_markov else dim
        yield "confidence_head.proj.weight", (1, width)
        yield "confidence_head.proj.bias", (1,)


def dense_context(
    scope: Scope, cfg: DenseDraftConfig, features: Tensor, positions: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Context keys and values ``[T, kv_heads, head_dim]`` of every layer.

    ``features [T, m * d]`` are the target's hidden states of tokens at ``positions`` int ``[T]``.
    """
    hidden = rms_norm(scope.linear("fc", features), scope["hidden_norm.weight"], cfg.rms_norm_eps)
    return [
        _keys_values(scope.at(f"layers.{layer}.self_attn"), cfg, hidden, positions)
        for layer in range(cfg.num_hidden_layers)
    ]


def dense_block(
    scope: Scope,
    cfg: DenseDraftConfig,
    context: list[tuple[Tensor, Tensor]],
    anchor: int,
    position: int,
) -> Tensor:
    """Final-normed hidden states ``[G, d]`` of a block whose slot 0 is ``anchor``.

    Every slot sees the whole context and the whole block.
    """
    token_ids = torch.full((cfg.block_size,), cfg.mask_token_id)
    token_ids[0] = anchor
    positions = torch.arange(position, position + cfg.block_size)
    x = scope["embed_tokens.weight"][token_ids]
    for layer, (past_keys, past_values) in enumerate(context):
        below = scope.at(f"layers.{layer}")
        attn, mlp = below.at("self_attn"), below.at("mlp")
        normed = rms_norm(x, below["input_layernorm.weight"], cfg.rms_norm_eps)
        keys, values = _keys_values(attn, cfg, normed, positions)
        keys, values = torch.cat([past_keys, keys]), torch.cat([past_values, values])
        queries = attn.linear("q_proj", normed).unflatten(-1, (-1, cfg.head_dim))
        queries = rms_norm(queries, attn["q_norm.weight"], cfg.rms_norm_eps)
        queries = _rotate_halves(queries, positions, cfg.rope_theta)
        queries = queries.unflatten(1, (cfg.num_key_value_heads, -1))
        scores = torch.einsum("sgrd,kgd->sgrk", queries, keys) * cfg.head_dim**-0.5
        attended = torch.einsum("sgrk,kgd->sgrd", scores.softmax(-1), values).flatten(1)
        x = x + attn.linear("o_proj", attended)
        normed = rms_norm(x, below["post_attention_layernorm.weight"], cfg.rms_norm_eps)
        gated = silu(mlp.linear("gate_proj", normed)) * mlp.linear("up_proj", normed)
        x = x + mlp.linear("down_proj", gated)
    return rms_norm(x, scope["norm.weight"], cfg.rms_norm_eps)


class DenseDrafter:
    """Drafter of one request; same use as :class:`torch_ref.draft.DSparkDrafter`."""

    def __init__(self, weights: Mapping[str, Tensor], cfg: DenseDraftConfig) -> None:
        """Start without context."""
        self._scope, self._cfg = Scope(weights), cfg
        empty = torch.zeros(0, cfg.num_key_value_heads, cfg.head_dim)
        self.context = [(empty, empty)] * cfg.num_hidden_layers
        self.length = 0
        self.draft_len = cfg.block_size
        self.target_layer_ids = cfg.target_layer_ids

    @torch.no_grad()
    def extend(self, features: Tensor) -> None:
        """Append the features ``[T, m * d]`` of the next T committed tokens."""
        positions = torch.arange(self.length, self.length + len(features))
        self.length += len(features)
        new = dense_context(self._scope, self._cfg, features, positions)
        self.context = [
            (torch.cat([old_keys, keys]), torch.cat([old_values, values]))
            for (old_keys, old_values), (keys, values) in zip(self.context, new)
        ]

    @torch.no_grad()
    def propose(self, anchor: int, choose: Choose = choose_greedy) -> Proposal:
        """Draft after ``anchor``, the token at position ``length``, choosing slot by slot."""
        scope, cfg = self._scope, self._cfg
        hidden = dense_block(scope, cfg, self.context, anchor, self.length)
        tokens, logits = sample_sequentially(
            scope.at("markov_head"),
            cfg.markov_head_type,
            scope.linear("lm_head", hidden),
            hidden,
            anchor,
            choose,
        )
        estimates = None
        if cfg.enable_confidence_head:
            with_markov = cfg.confidence_head_with_markov
            estimates = confidences(scope, hidden, anchor, tokens, with_markov)
        return Proposal(tokens, logits, estimates)


def _keys_values(
    attn: Scope, cfg: DenseDraftConfig, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    keys = attn.linear("k_proj", x).unflatten(-1, (-1, cfg.head_dim))
    keys = rms_norm(keys, attn["k_norm.weight"], cfg.rms_norm_eps)
    values = attn.linear("v_proj", x).unflatten(-1, (-1, cfg.head_dim))
    return _rotate_halves(keys, positions, cfg.rope_theta), values


def _rotate_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate ``x [S, H, D]``, channel i paired with channel ``i + D/2``."""
    dim = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
