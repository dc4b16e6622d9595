"""Definition of `expert_mlp`: few tokens gather their experts, many run every expert and keep their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.kernels.quantized import dequantize, take


def expert_mlp_reference(x, expert_ids, weights, w_gate_up, w_down, *, layer, limit) -> jax.Array:
    """See `expert_mlp` for arguments and result."""
    experts = w_gate_up.shape[1]
    x = x.astype(jnp.float32)
    weights = jnp.where(expert_ids < experts, weights, 0.0)
    # Gathering reads T*k experts, the dense form all of them: the smaller read wins on a CPU.
    if expert_ids.size <= experts:
        return _gathered(x, expert_ids, weights, w_gate_up, w_down, layer, limit)
    return _dense(x, expert_ids, weights, w_gate_up, w_down, layer, limit)


def _gathered(x, expert_ids, weights, w_gate_up, w_down, layer, limit):
    index = (layer, jnp.minimum(expert_ids, w_gate_up.shape[1] - 1))
    gate_up = jnp.einsum("tm,tkfm->tkf", x, dequantize(take(w_gate_up, index)))
    hidden = _swiglu(gate_up, limit) * weights[..., None]
    return jnp.einsum("tkf,tkmf->tm", hidden, dequantize(take(w_down, index)))


def _dense(x, expert_ids, weights, w_gate_up, w_down, layer, limit):
    experts = w_gate_up.shape[1]
    share = jnp.sum(jax.nn.one_hot(expert_ids, experts) * weights[..., None], axis=1)  # [T, E]
    gate_up = jnp.einsum("tm,efm->tef", x, dequantize(take(w_gate_up, (layer,))))
    hidden = _swiglu(gate_up, limit) * share[..., None]
    return jnp.einsum("tef,emf->tm", hidden, dequantize(take(w_down, (layer,))))


def _swiglu(gate_up, limit):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
