"""The drafter over many blocks at once, differentiable: the model of `dspark_jax.draft` without caches.

Blocks are drafted at chosen anchors of whole sequences whose features are known. Each gathers the context rows of
the last W tokens before its anchor; queries see these and the whole block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.draft.backbone import context_rows
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model import hyper
from dspark_jax.model.attention import latent_rows, project_output, queries
from dspark_jax.model.layers import rotary_frequencies
from dspark_jax.model.params import Block
from dspark_jax.training.forward import cast_params
from dspark_jax.training.layers import collapse, enter, experts, leave, mix, wide_linear

_MASKED = -1e30


def cast_draft(params: DraftParams, cfg: ModelConfig, dtype: Any) -> DraftParams:
    """Parameters for computing in `dtype`.

    The Markov rows stay as they are until one is looked up, so that the gradients of a frequent token's row, which
    many blocks share, are not summed in bfloat16.
    """
    cast = cast_params(params, draft_specs(cfg), dtype)
    return cast.replace(markov_w1=params.markov_w1)


def sequence_rows(params: DraftParams, cfg: ModelConfig, taps: jax.Array) -> jax.Array:
    """Context rows [stages, S, B, D] of features taps [S, B, taps, M] at positions 0 ... S-1."""
    length, batch = taps.shape[:2]
    positions = jnp.repeat(jnp.arange(length), batch)
    flat = taps.reshape(length * batch, *taps.shape[2:])
    rows = context_rows(params, cfg, flat, positions, dispatch=Dispatch())
    return rows.reshape(len(rows), length, batch, -1)


def gather_window(rows: jax.Array, anchors: jax.Array, window: int) -> tuple[jax.Array, jax.Array]:
    """The rows before each anchor.

    Args:
      rows: [stages, S, B, D]. anchors: int32 [B, A], positions.

    Returns:
      [stages, B*A, window, D], the newest last, and which of them exist, bool [B*A, window].
    """
    place = anchors[..., None] - window + jnp.arange(window)  # [B, A, window]
    owner = jnp.arange(rows.shape[2])[:, None, None]
    # Wide, because the gradient of a gather is a sum over all blocks that read the row.
    gathered = rows.astype(jnp.float32)[:, jnp.maximum(place, 0), owner].astype(rows.dtype)
    shape = (anchors.size, window)
    return gathered.reshape(len(rows), *shape, -1), (place >= 0).reshape(shape)


def run_blocks(
    params: DraftParams,
    embed: jax.Array,
    cfg: ModelConfig,
    window: jax.Array,
    visible: jax.Array,
    *,
    anchors: jax.Array,
    positions: jax.Array,
    fused: bool,
) -> tuple[jax.Array, jax.Array]:
    """Hidden states of N draft blocks before the final norm, as `draft.backbone.run_block`.

    Args:
      params: plain arrays; computes in the dtype of `embed` [V, M], the target's embedding.
      window, visible: what `gather_window` returns.
      anchors, positions: int32 [N], the last known token and its position.
      fused: run the Sinkhorn iterations as a GPU kernel.

    Returns:
      [N, G, M], and the expert loads of each stage, float32 [stages, E].
    """
    assert cfg.draft is not None
    length = cfg.draft.block_size
    ids = jnp.full((len(anchors), length), cfg.draft.noise_token_id, jnp.int32)
    ids = ids.at[:, 0].set(anchors)
    streams = hyper.spread(embed[ids], cfg.hc_mult)
    block_positions = positions[:, None] + jnp.arange(length)
    loads = []
    for i in range(len(window)):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params.stages)
        with jax.named_scope(f"draft_stage_{i}"):
            weights = mix(streams, block.hyper_attn, cfg, fused=fused)
            h = rms_norm(enter(streams, weights), block.g_attn, cfg.rms_norm_eps)
            out = _attention(h, block, window[i], visible, block_positions, cfg)
            streams = leave(streams, out, weights)
            weights = mix(streams, block.hyper_ffn, cfg, fused=fused)
            h = rms_norm(enter(streams, weights), block.g_ffn, cfg.rms_norm_eps)
            out, load = experts(h, block, cfg)
            loads.append(load)
            streams = leave(streams, out, weights)
    return collapse(streams, params.hyper_head, cfg), jnp.stack(loads)


def _attention(
    h: jax.Array,
    block: Block,
    window: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    cfg: ModelConfig,
) -> jax.Array:
    """h [N, G, M] attends to window [N, W, D] where visible [N, W], and to the whole block."""
    frequencies = rotary_frequencies(cfg, compressed=False)
    q, _ = queries(h, block, positions, frequencies, cfg)
    own = latent_rows(h, block, positions, frequencies, cfg.rms_norm_eps)
    keys = jnp.concatenate([window, own], axis=1)
    valid = jnp.concatenate([visible, jnp.ones(own.shape[:2], bool)], axis=1)
    scores = jnp.einsum("nghd,nkd->nghk", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, None, None], scores * cfg.head_dim**-0.5, _MASKED)
    sink = block.attn_sink[:, None]
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum(
        "nghk,nkd->nghd",
        (weights / total).astype(h.dtype),
        keys,
        preferred_element_type=jnp.float32,
    )
    return project_output(out.astype(h.dtype), block, positions, frequencies, cfg)


def base_logits(
    params: DraftParams, head: jax.Array, cfg: ModelConfig, hidden: jax.Array
) -> jax.Array:
    """Logits float32 [..., V] of collapsed states [..., M], before the transition is added."""
    return wide_linear(rms_norm(hidden, params.g_norm, cfg.rms_norm_eps), head)


def transition(params: DraftParams, previous: jax.Array, dtype: Any) -> jax.Array:
    """`draft.heads.transition_logits` with operands in `dtype`: float32 [..., V]."""
    return wide_linear(params.markov_w1[previous].astype(dtype), params.markov_w2)
