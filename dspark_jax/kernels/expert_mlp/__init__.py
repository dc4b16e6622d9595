"""Routed experts: every token through its k clamped SwiGLU experts, weighted and summed."""

from __future__ import annotations

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.expert_mlp.reference import expert_mlp_reference
from dspark_jax.kernels.quantized import Weight


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    w_gate_up: Weight,
    w_down: Weight,
    *,
    layer: jax.Array | int,
    limit: float,
    dispatch: Dispatch,
) -> jax.Array:
    """sum_j weights_j * (silu(min(x w1, limit)) * clip(x w3, -limit, limit)) w2 over the k chosen experts.

    The weight multiplies before w2, as in the released program.

    Args:
      x: [T, M]. expert_ids: int32 [T, k]; an id of E or more contributes nothing (padding).
      weights: float32 [T, k].
      w_gate_up: [L, E, 2F, M], rows [0:F) w1 and [F:2F) w3; w_down: [L, E, M, F]. Plain, fp8 or fp4.

    Returns:
      float32 [T, M].

    Raises:
      ValueError: M or F is no multiple of 16, or of packed fp4 none of 64 (Pallas only).
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.expert_mlp.pallas_triton import expert_mlp_pallas

        return expert_mlp_pallas(
            x,
            expert_ids,
            weights,
            w_gate_up,
            w_down,
            layer=layer,
            limit=limit,
            dispatch=dispatch,
        )
    return expert_mlp_reference(x, expert_ids, weights, w_gate_up, w_down, layer=layer, limit=limit)
