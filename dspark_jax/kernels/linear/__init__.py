"""Products with one layer's matrix of a stack that is read where it lies: quantised weights stay quantised."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.linear.reference import stacked_linear_reference
from dspark_jax.kernels.quantized import Weight


class LayerWeight(struct.PyTreeNode):
    """One layer's matrix, not cut out of its stack: XLA copies a slice before a kernel or a product reads it."""

    stack: Weight  # [L, N, K]
    layer: jax.Array | int
    dispatch: Dispatch = struct.field(pytree_node=False)


def stacked_linear(
    x: jax.Array,
    stack: Weight,
    *,
    layer: jax.Array | int,
    dtype: Any = None,
    dispatch: Dispatch,
) -> jax.Array:
    """x times the transpose of `stack[layer]`, group by group, accumulated in float32.

    Args:
      x: [T, G, K]. stack: [L, G*N, K], plain, fp8 or fp4; group g meets its rows [g*N, (g+1)*N).

    Returns:
      [T, G, N] in `dtype`, that of x by default.

    Raises:
      ValueError: N or K is no multiple of 16, or K of packed fp4 none of 64 (Pallas only).
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.linear.pallas_triton import stacked_linear_pallas

        return stacked_linear_pallas(x, stack, layer=layer, dtype=dtype, dispatch=dispatch)
    return stacked_linear_reference(x, stack, layer=layer, dtype=dtype)
