"""Manifold-constrained hyper-connections: N residual streams mixed around every attention and expert block.

The mixing matrix is made doubly stochastic by Sinkhorn normalisation and applied transposed: destination k
receives sum_j comb[j, k] * stream_j. All mixes are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.hyper import Entered, hyper_enter, hyper_leave
from dspark_jax.model.layers import linear_f32
from dspark_jax.model.params import Hyper, HyperHead


def spread(embedding: jax.Array, streams: int) -> jax.Array:
    """Copy an embedding [..., M] to every stream [..., N, M]."""
    return jnp.broadcast_to(
        embedding[..., None, :], (*embedding.shape[:-1], streams, embedding.shape[-1])
    )


def enter(
    streams: jax.Array,
    stack: Hyper,
    gain: jax.Array,
    *,
    layer: jax.Array | int,
    cfg: ModelConfig,
    dispatch: Dispatch,
) -> Entered:
    """Normed input of one layer's block from its streams [T, N, M], and how its output goes back.

    `stack` and the norm's `gain` [L, M] hold all layers.
    """
    return hyper_enter(
        streams,
        stack.w_fn,
        stack.base,
        stack.scale,
        gain,
        layer=layer,
        iterations=cfg.hc_sinkhorn_iters,
        eps=cfg.hc_eps,
        norm_eps=cfg.rms_norm_eps,
        dispatch=dispatch,
    )


def leave(
    streams: jax.Array, output: jax.Array, entered: Entered, *, dispatch: Dispatch
) -> jax.Array:
    """Streams after the block: the old ones mixed by `comb`, plus the block's output [T, M] by `post`."""
    return hyper_leave(streams, output, entered.post, entered.comb, dispatch=dispatch)


def collapse(streams: jax.Array, head: HyperHead, cfg: ModelConfig) -> jax.Array:
    """The streams [..., N, M] as one hidden state [..., M] before the final norm."""
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(
        jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + cfg.rms_norm_eps
    )
    z = linear_f32(flat, head.w_fn) * inverse_rms
    weights = jax.nn.sigmoid(z * head.scale + head.base) + cfg.hc_eps
    mixed = jnp.einsum("...n,...nm->...m", weights, streams.astype(jnp.float32))
    return mixed.astype(streams.dtype)
