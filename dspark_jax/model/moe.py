"""Routing of tokens to experts, and the expert block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.router import route
from dspark_jax.model.layers import clamped_swiglu, linear, linear_f32
from dspark_jax.model.params import Block


def choose_experts(
    h: jax.Array,
    block: Block,
    stack: Block,
    *,
    layer: jax.Array | int,
    is_token: jax.Array,
    table: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    cfg: ModelConfig,
    dispatch: Dispatch,
) -> tuple[jax.Array, jax.Array]:
    """Experts int32 [T, k] of h [T, M], and weights float32 [T, k] of sum `routed_scaling_factor`: see `route`.

    Padding goes to no expert, so it costs a grouped kernel nothing.
    """
    return route(
        linear_f32(h, block.w_router),
        stack.b_router,
        layer=layer,
        k=cfg.num_experts_per_tok,
        scale=cfg.routed_scaling_factor,
        is_token=is_token,
        table=table,
        token_ids=token_ids,
        dispatch=dispatch,
    )


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
