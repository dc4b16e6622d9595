"""A tiny model for the tests of training, every mechanism included."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import AttentionKind, DraftConfig, ModelConfig
from dspark_jax.model.params import Spec

SLIDING, CSA, HCA = AttentionKind.SLIDING, AttentionKind.CSA, AttentionKind.HCA

TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=8,
    attention_kinds=(SLIDING, SLIDING, CSA, HCA, CSA, HCA),
    csa_ratio=4,
    hca_ratio=8,
    index_n_heads=32,
    index_head_dim=16,
    index_topk=3,
    max_position_embeddings=256,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    num_hash_layers=1,
    draft=DraftConfig(
        block_size=4,
        noise_token_id=63,
        target_layer_ids=(3, 4, 5),
        markov_rank=8,
        num_stages=2,
    ),
)

SHALLOW = dataclasses.replace(
    TINY,
    num_hidden_layers=3,
    attention_kinds=(SLIDING, CSA, HCA),
    hc_sinkhorn_iters=4,
    draft=dataclasses.replace(TINY.draft, target_layer_ids=(0, 1, 2), num_stages=1),
)
"""One layer of each kind, quick to compile with its gradient."""


def perturbed(specs, seed: int):
    """Random parameters in which nothing keeps a neutral initial value."""
    draw = np.random.default_rng(seed)

    def value(spec: Spec) -> np.ndarray:
        if spec.init == "table":
            noise = draw.random((*spec.shape[:2], TINY.n_routed_experts))
            return noise.argsort(-1)[..., : spec.shape[-1]].astype(np.int32)
        noise = draw.standard_normal(spec.shape).astype(np.float32)
        if spec.init == "matrix":
            return noise * spec.shape[-1] ** -0.5
        return np.float32(spec.init == "one") + np.float32(0.2) * noise

    drawn = jax.tree.map(value, specs, is_leaf=lambda x: isinstance(x, Spec))
    return jax.tree.map(jnp.asarray, drawn)
