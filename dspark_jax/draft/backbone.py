"""The drafter's parallel stage: context rows from the target's features, and one pass over the draft block.

Context entries exist only for tokens that went through the target. The block is the anchor and G - 1 noise tokens
at positions n .. n+G-1; slot j predicts position n+j+1. Every block query sees the last W context rows and all
block rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.draft.params import DraftParams
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model import attention as attn
from dspark_jax.model import hyper, moe
from dspark_jax.model.layers import linear, rotary_frequencies, rotate
from dspark_jax.model.params import Block, Params, layer_block, layer_matrix


def context_rows(
    params: DraftParams,
    cfg: ModelConfig,
    taps: jax.Array,
    positions: jax.Array,
    *,
    dispatch: Dispatch,
) -> jax.Array:
    """Rows that each stage's attention will read for these tokens.

    Args:
      taps: [T, taps, M] stream means after the target layers of `cfg.draft`. positions: int32 [T].

    Returns:
      [stages, T, D], rotated. They skip the stages' input norms: the projected feature goes straight in.
    """
    w_main = layer_matrix(jax.tree.map(lambda x: x[None], params.w_main), 0, dispatch)
    features = linear(taps.reshape(taps.shape[0], -1), w_main)
    features = rms_norm(features, params.g_main, cfg.rms_norm_eps)
    w_kv, g_kv = params.stages.w_kv, params.stages.g_kv
    by_stage = [linear(features, layer_matrix(w_kv, i, dispatch)) for i in range(w_kv.shape[0])]
    rows = rms_norm(jnp.stack(by_stage, axis=1), g_kv, cfg.rms_norm_eps)  # [T, stages, D]
    rows = rotate(rows, positions, rotary_frequencies(cfg, compressed=False))
    return jnp.moveaxis(rows, 1, 0)


def write_context(
    ring: jax.Array,
    rows: jax.Array,
    *,
    slots: jax.Array,
    positions: jax.Array,
    kept: jax.Array,
    behind: jax.Array,
) -> jax.Array:
    """Store kept rows [stages, T, D] in the ring [stages, slots, W, D] at position mod W.

    `kept` bool [T] marks committed tokens, `behind` int32 [T] how many of the same request follow.
    """
    length = ring.shape[2]
    slot = jnp.where(kept & (behind < length), slots, ring.shape[1])
    return ring.at[:, slot, positions % length].set(rows.astype(ring.dtype), mode="drop")


def run_block(
    params: DraftParams,
    target: Params,
    cfg: ModelConfig,
    window: jax.Array,
    *,
    anchors: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    is_row: jax.Array,
    dispatch: Dispatch,
) -> jax.Array:
    """Hidden states of the draft block before the final norm: [R, G, M].

    Args:
      window: [stages, slots, W, D] context ring holding positions < `positions`.
      anchors, positions, slots: int32 [R]: last committed token, its position, its slot.
      is_row: bool [R]; other rows go to no expert and their result has no meaning.
    """
    assert cfg.draft is not None
    g, length = cfg.draft.block_size, window.shape[2]
    ids = jnp.full((anchors.shape[0], g), cfg.draft.noise_token_id, jnp.int32).at[:, 0].set(anchors)
    block_positions = positions[:, None] + jnp.arange(g)
    streams = hyper.spread(target.embed[ids.reshape(-1)], cfg.hc_mult)  # [R * G, N, M]
    # Ring place s holds the newest position below n that is s modulo W, if there is one.
    place = jnp.arange(length)
    held = positions[:, None] - 1 - (positions[:, None] - 1 - place) % length
    visible = held >= 0  # [R, W]
    is_token = jnp.repeat(is_row, g)
    stack = params.stages
    fixed = {"cfg": cfg, "dispatch": dispatch}
    for i in range(stack.w_kv.shape[0]):
        block = layer_block(stack, i, dispatch)
        with jax.named_scope(f"draft_stage_{i}"):
            entered = hyper.enter(streams, stack.hyper_attn, stack.g_attn, layer=i, **fixed)
            h = entered.block_input.reshape(*ids.shape, -1)
            out = _attention(h, block, window[i, slots], visible, block_positions, cfg)
            out = out.reshape(entered.block_input.shape)
            streams = hyper.leave(streams, out, entered, dispatch=dispatch)
            entered = hyper.enter(streams, stack.hyper_ffn, stack.g_ffn, layer=i, **fixed)
            h = entered.block_input
            chosen, weights = moe.choose_experts(
                h, block, stack, layer=i, is_token=is_token, **fixed
            )
            out = moe.expert_block(h, chosen, weights, block, stack, layer=i, **fixed)
            streams = hyper.leave(streams, out, entered, dispatch=dispatch)
    return hyper.collapse(streams, params.hyper_head, cfg).reshape(*ids.shape, -1)


def _attention(
    h: jax.Array,
    block: Block,
    context: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    cfg: ModelConfig,
) -> jax.Array:
    """h [R, G, M] attends to context [R, W, D] where visible [R, W], and to the whole block."""
    frequencies = rotary_frequencies(cfg, compressed=False)
    q, _ = attn.queries(h, block, positions, frequencies, cfg)
    own = attn.latent_rows(h, block, positions, frequencies, cfg.rms_norm_eps)
    context = jnp.where(visible[..., None], context, 0)
    keys = jnp.concatenate([context.astype(own.dtype), own], axis=1).astype(jnp.float32)
    valid = jnp.concatenate([visible, jnp.ones(own.shape[:2], bool)], axis=1)
    logits = jnp.einsum("rghd,rkd->rghk", q.astype(jnp.float32), keys) * cfg.head_dim**-0.5
    logits = jnp.where(valid[:, None, None], logits, -jnp.inf)
    sink = block.attn_sink[:, None]
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum("rghk,rkd->rghd", weights / total, keys).astype(h.dtype)
    return attn.project_output(out, block, positions, frequencies, cfg)
