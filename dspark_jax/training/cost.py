"""Multiply-adds of the target and its drafter, counted from a configuration."""

from __future__ import annotations

from typing import NamedTuple

from dspark_jax.config import AttentionKind, ModelConfig


class MultiplyAdds(NamedTuple):
    """Multiply-adds per token, slot and row, and what a round's draft costs relative to its verification."""

    target_token: int
    draft_slot: int
    context_row: int
    draft_share: float


def multiply_adds(cfg: ModelConfig, context: int) -> MultiplyAdds:
    """Cost at `context` tokens of context, unrouted experts left out.

    `draft_share` is one proposal and the context rows of the tokens verified before it, relative to verifying the
    proposal and its anchor.
    """
    assert cfg.draft is not None
    c, v = cfg.hidden_size, cfg.vocab_size
    block, window = cfg.draft.block_size, min(cfg.sliding_window, context)
    collapse = cfg.hc_mult * cfg.hc_mult * c + cfg.hc_mult * c
    target = v * c + collapse
    for kind in cfg.attention_kinds:
        entries = 0
        if kind is AttentionKind.CSA:
            candidates = context // cfg.csa_ratio
            entries = min(cfg.index_topk, candidates)
            index_width = cfg.index_n_heads * cfg.index_head_dim
            target += 4 * (cfg.head_dim + cfg.index_head_dim) * c
            target += index_width * (cfg.q_lora_rank + candidates) + cfg.index_n_heads * c
        elif kind is AttentionKind.HCA:
            entries = context // cfg.hca_ratio
            target += 2 * cfg.head_dim * c
        target += _layer(cfg, window + entries)
    stages = cfg.draft.num_stages
    slot = stages * _layer(cfg, window + block) + collapse + v * c
    slot += v * cfg.draft.markov_rank + c + cfg.draft.markov_rank
    row = len(cfg.draft.target_layer_ids) * c * c + stages * cfg.head_dim * c
    share = (block * slot + (block + 1) * row) / ((block + 1) * target)
    return MultiplyAdds(target, slot, row, share)


def _layer(cfg: ModelConfig, keys: int) -> int:
    """One layer of one token: projections, attention over `keys` rows, experts and both mixes."""
    c, n = cfg.hidden_size, cfg.hc_mult
    heads = cfg.num_attention_heads * cfg.head_dim
    attention = cfg.q_lora_rank * (c + heads) + cfg.head_dim * c + 2 * heads * keys
    attention += cfg.o_lora_rank * (heads + cfg.o_groups * c)
    expert = 3 * cfg.moe_intermediate_size * c
    experts = (cfg.num_experts_per_tok + 1) * expert + cfg.n_routed_experts * c
    mix = (2 + n) * n * n * c + (2 + n) * n * c
    return attention + experts + 2 * mix
