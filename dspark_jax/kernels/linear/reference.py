"""Definition of `stacked_linear`: expand the layer's matrix, one product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.kernels.quantized import Weight, dequantize, take


def stacked_linear_reference(
    x: jax.Array, stack: Weight, *, layer, written: Any = jnp.float32
) -> jax.Array:
    """See `stacked_linear` for arguments and result; `written` is the dtype asked of the product."""
    groups, inner = x.shape[1:]
    matrix = dequantize(take(stack, (layer,)), x.dtype).reshape(groups, -1, inner)
    out = jnp.einsum("tgk,gnk->tgn", x, matrix, preferred_element_type=written)
    return out.astype(x.dtype)
