"""Routing of tokens to experts, and the expert block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers import linear_f32


def router_scores(h: jax.Array, w_router: jax.Array) -> jax.Array:
    """sqrt(softplus(h W)) for h [..., M], w_router [E, M] -> [..., E] float32."""
    return jnp.sqrt(jax.nn.softplus(linear_f32(h, w_router)))


def choose_by_score(scores: jax.Array, bias: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The k experts [..., k] with the highest score + bias; the bias only selects."""
    return jax.lax.top_k(scores + bias, cfg.num_experts_per_tok)[1]


def expert_weights(scores: jax.Array, expert_ids: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Weights [..., k] of the chosen experts: their scores to sum `routed_scaling_factor`, float32."""
    chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
    total = jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20
    return chosen / total * cfg.routed_scaling_factor
