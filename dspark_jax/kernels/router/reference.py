"""Definition of `route`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def route_reference(
    logits, bias, is_token, table, token_ids, *, layer, k, scale
) -> tuple[jax.Array, jax.Array]:
    """See `route` for arguments and result."""
    scores = jnp.sqrt(jax.nn.softplus(logits))
    expert_ids = jax.lax.top_k(scores + bias[layer], k)[1]
    if table is not None:
        # A choice at run time: a scan of its own for the few hash layers would take as long to compile again.
        fixed = table[jnp.minimum(layer, table.shape[0] - 1), token_ids]
        expert_ids = jnp.where(layer < table.shape[0], fixed, expert_ids)
    chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
    weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20) * scale
    is_token = is_token[:, None]
    return jnp.where(is_token, expert_ids, logits.shape[-1]), jnp.where(is_token, weights, 0.0)
