"""Routing of tokens to experts, and the expert block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.linear import LayerWeight
from dspark_jax.kernels.quantized import Weight
from dspark_jax.model.layers import clamped_swiglu, linear, linear_f32
from dspark_jax.model.params import Block


def router_scores(h: jax.Array, w_router: Weight | LayerWeight) -> jax.Array:
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


def expert_block(
    h: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    block: Block,
    stack: Block,
    *,
    layer: jax.Array | int,
    cfg: ModelConfig,
    dispatch: Dispatch,
) -> jax.Array:
    """Routed experts plus the shared one: h [T, M] -> [T, M].

    `block` is the layer's own slice of `stack`; the routed experts are read from the stack by layer index, since
    slicing them out would copy every expert of the layer.
    """
    routed = expert_mlp(
        h,
        expert_ids,
        weights,
        stack.w_gate_up,
        stack.w_down,
        layer=layer,
        limit=cfg.swiglu_limit,
        dispatch=dispatch,
    )
    gate, up = jnp.split(linear(h, block.w_shared_gate_up), 2, axis=-1)
    shared = linear(clamped_swiglu(gate, up, cfg.swiglu_limit), block.w_shared_down)
    return (routed + shared.astype(jnp.float32)).astype(h.dtype)
