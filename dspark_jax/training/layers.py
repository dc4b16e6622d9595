"""Layers of target and drafter that differ from inference: mixes in the streams' dtype, experts without sorting.

Every expert sees every token and unrouted ones get weight zero: faster than sorting for a model this small, and
differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.hyper.reference import sinkhorn
from dspark_jax.model.layers import clamped_swiglu, linear
from dspark_jax.model.params import Block, Hyper, HyperHead
from dspark_jax.training.sinkhorn import fused_sinkhorn


class Mix(NamedTuple):
    """Weights of one block: into it, out of it, and between the streams around it (all float32)."""

    pre: jax.Array  # [..., N]
    post: jax.Array  # [..., N]
    comb: jax.Array  # [..., N, N] source, destination


def mix(streams: jax.Array, weights: Hyper, cfg: ModelConfig, *, fused: bool) -> Mix:
    """The weights of `kernels.hyper`, projected in the dtype of the streams, with a choice of Sinkhorn."""
    n = cfg.hc_mult
    z = _normed_projection(streams, weights.w_fn, cfg.rms_norm_eps)
    pre, post, comb = jnp.split(z, [n, 2 * n], axis=-1)
    b_pre, b_post, b_comb = jnp.split(weights.base, [n, 2 * n])
    comb = (comb * weights.scale[2] + b_comb).reshape(*comb.shape[:-1], n, n)
    normalise = fused_sinkhorn if fused else sinkhorn
    return Mix(
        pre=jax.nn.sigmoid(pre * weights.scale[0] + b_pre) + cfg.hc_eps,
        post=2 * jax.nn.sigmoid(post * weights.scale[1] + b_post),
        comb=normalise(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps),
    )


def enter(streams: jax.Array, weights: Mix) -> jax.Array:
    """Sum of `hyper_enter` before its norm, elementwise: a batched product of 4 x 4 matrices is slow on a GPU."""
    wide = streams.astype(jnp.float32)
    return jnp.sum(weights.pre[..., None] * wide, axis=-2).astype(streams.dtype)


def leave(streams: jax.Array, output: jax.Array, weights: Mix) -> jax.Array:
    """`hyper_leave`, elementwise."""
    wide = streams.astype(jnp.float32)
    mixed = jnp.sum(weights.comb[..., None] * wide[..., :, None, :], axis=-3)
    added = weights.post[..., None] * output.astype(jnp.float32)[..., None, :]
    return (mixed + added).astype(streams.dtype)


def collapse(streams: jax.Array, head: HyperHead, cfg: ModelConfig) -> jax.Array:
    """`hyper.collapse`, elementwise, with the projection in the dtype of the streams."""
    z = _normed_projection(streams, head.w_fn, cfg.rms_norm_eps)
    weights = jax.nn.sigmoid(z * head.scale + head.base) + cfg.hc_eps
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=-2).astype(streams.dtype)


def _normed_projection(streams: jax.Array, w_fn: jax.Array, eps: float) -> jax.Array:
    flat = streams.reshape(*streams.shape[:-2], -1)
    mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
    return wide_linear(flat, w_fn) * jax.lax.rsqrt(mean_square + eps)


def wide_linear(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [..., K] times the transpose of matrix [N, K] with a float32 result; operands in the dtype of x."""
    return jnp.einsum(
        "...k,nk->...n",
        x,
        matrix.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )


def experts(
    h: jax.Array, block: Block, cfg: ModelConfig, *, chosen: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Expert block of h [..., M]: output [..., M] and loads [E].

    `chosen` bool [..., E] fixes the experts; by default the router's scores and bias choose, ties to the lowest.
    """
    scores = jnp.sqrt(jax.nn.softplus(wide_linear(h, block.w_router)))
    if chosen is None:
        chosen = highest(jax.lax.stop_gradient(scores) + block.b_router, cfg.num_experts_per_tok)
    kept = jnp.where(chosen, scores, 0.0)
    gates = kept / (jnp.sum(kept, axis=-1, keepdims=True) + 1e-20) * cfg.routed_scaling_factor
    assert isinstance(block.w_gate_up, jax.Array)  # masters are trained, not what is stored of them
    e, two_f, m = block.w_gate_up.shape
    both = linear(h, block.w_gate_up.reshape(e * two_f, m)).reshape(*h.shape[:-1], e, 2, two_f // 2)
    acted = clamped_swiglu(both[..., 0, :], both[..., 1, :], cfg.swiglu_limit)
    acted = (acted.astype(jnp.float32) * gates[..., None]).astype(h.dtype)
    routed = jnp.einsum("...ef,emf->...m", acted, block.w_down, preferred_element_type=jnp.float32)
    gate, up = jnp.split(linear(h, block.w_shared_gate_up), 2, axis=-1)
    shared = linear(clamped_swiglu(gate, up, cfg.swiglu_limit), block.w_shared_down)
    axes = tuple(range(h.ndim - 1))
    loads = jnp.mean(chosen.astype(jnp.float32), axis=axes) / cfg.num_experts_per_tok
    return (routed + shared.astype(jnp.float32)).astype(h.dtype), loads


def highest(scores: jax.Array, count: int) -> jax.Array:
    """Which of a few scores [..., E] are the `count` highest, ties to the lowest index: bool [..., E]."""
    index = np.arange(scores.shape[-1])
    mine, other = scores[..., :, None], scores[..., None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return jnp.sum(ahead, axis=-1) < count
