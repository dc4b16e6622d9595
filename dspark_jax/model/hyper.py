"""Manifold-constrained hyper-connections: N residual streams mixed around every attention and expert block.

The mixing matrix is made doubly stochastic by Sinkhorn normalisation and applied transposed: destination k
receives sum_j comb[j, k] * stream_j. All mixes are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers import linear_f32
from dspark_jax.model.params import Hyper, HyperHead


class Mix(NamedTuple):
    """Weights of one block: into it, out of it, and between the streams around it (all float32)."""

    pre: jax.Array  # [..., N]
    post: jax.Array  # [..., N]
    comb: jax.Array  # [..., N, N] source, destination


def spread(embedding: jax.Array, streams: int) -> jax.Array:
    """Copy an embedding [..., M] to every stream [..., N, M]."""
    return jnp.broadcast_to(
        embedding[..., None, :], (*embedding.shape[:-1], streams, embedding.shape[-1])
    )


def mix(streams: jax.Array, hyper: Hyper, cfg: ModelConfig) -> Mix:
    """Weights of a block from its streams [..., N, M] and one layer's `hyper`."""
    n = cfg.hc_mult
    z = _normed_projection(streams, hyper.w_fn, cfg.rms_norm_eps)
    pre, post, comb = jnp.split(z, [n, 2 * n], axis=-1)
    b_pre, b_post, b_comb = jnp.split(hyper.base, [n, 2 * n])
    comb = (comb * hyper.scale[2] + b_comb).reshape(*comb.shape[:-1], n, n)
    return Mix(
        pre=jax.nn.sigmoid(pre * hyper.scale[0] + b_pre) + cfg.hc_eps,
        post=2 * jax.nn.sigmoid(post * hyper.scale[1] + b_post),
        comb=sinkhorn(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps),
    )


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Near doubly stochastic matrix of logits [..., N, N]: a row softmax, then columns and rows in turn.

    Ends on columns: 1 + (iterations - 1) column normalisations, iterations - 1 row normalisations.
    """

    def columns(m: jax.Array) -> jax.Array:
        return m / (jnp.sum(m, axis=-2, keepdims=True) + eps)

    def rows_then_columns(_, m: jax.Array) -> jax.Array:
        return columns(m / (jnp.sum(m, axis=-1, keepdims=True) + eps))

    first = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.fori_loop(0, iterations - 1, rows_then_columns, first)


def enter(streams: jax.Array, weights: Mix) -> jax.Array:
    """Input of the block: streams [..., N, M] weighted by `pre` -> [..., M], dtype of the streams."""
    mixed = jnp.einsum("...n,...nm->...m", weights.pre, streams.astype(jnp.float32))
    return mixed.astype(streams.dtype)


def leave(streams: jax.Array, output: jax.Array, weights: Mix) -> jax.Array:
    """Streams after the block: the old ones mixed by `comb`, plus the block's output [..., M] by `post`."""
    mixed = jnp.einsum("...jk,...jm->...km", weights.comb, streams.astype(jnp.float32))
    added = weights.post[..., None] * output.astype(jnp.float32)[..., None, :]
    return (mixed + added).astype(streams.dtype)


def collapse(streams: jax.Array, head: HyperHead, cfg: ModelConfig) -> jax.Array:
    """The streams [..., N, M] as one hidden state [..., M] before the final norm."""
    z = _normed_projection(streams, head.w_fn, cfg.rms_norm_eps)
    weights = jax.nn.sigmoid(z * head.scale + head.base) + cfg.hc_eps
    mixed = jnp.einsum("...n,...nm->...m", weights, streams.astype(jnp.float32))
    return mixed.astype(streams.dtype)


def _normed_projection(streams: jax.Array, w_fn: jax.Array, eps: float) -> jax.Array:
    """Project the flattened streams, normalised to unit root mean square (no gain), in float32."""
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + eps)
    return linear_f32(flat, w_fn) * scale
