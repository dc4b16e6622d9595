"""The DSpark drafter in DeepSpec's layout: Qwen3-style layers over the target's features of the whole context.

As in the released V4 layout, context rows exist only for tokens that went through the target, the block is the
anchor and G - 1 mask tokens at positions n .. n+G-1, every block query sees all context rows and the whole block,
and slot j predicts position n+j+1. There is no window: a row stands at its own position in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.draft.dense_heads import confidences, start_state, transition_logits
from dspark_jax.draft.dense_params import DenseDraftConfig, DenseDraftParams, DenseLayer
from dspark_jax.draft.propose import (
    Chooser,
    Proposal,
    draw_in_sequence,
    tokens_before,
)
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model.layers import linear, linear_f32


class DenseContext(NamedTuple):
    """Context rows of every layer and slot, S the longest context."""

    keys: jax.Array  # [L, slots, S, KV, D], rotated
    values: jax.Array  # [L, slots, S, KV, D]


def init_dense_context(
    cfg: DenseDraftConfig,
    *,
    slots: int,
    max_len: int,
    dtype: Any = jnp.float32,
    fill: float = 0.0,
) -> DenseContext:
    """An empty context for `slots` requests of up to `max_len` tokens. `fill` poisons it, for tests."""
    shape = (cfg.num_hidden_layers, slots, max_len, cfg.num_key_value_heads, cfg.head_dim)
    return DenseContext(keys=jnp.full(shape, fill, dtype), values=jnp.full(shape, fill, dtype))


def extend_dense_context(
    params: DenseDraftParams,
    cfg: DenseDraftConfig,
    context: DenseContext,
    features: jax.Array,
    *,
    slots: jax.Array,
    positions: jax.Array,
    kept: jax.Array,
) -> DenseContext:
    """Write the rows of committed tokens.

    Args:
      features: [T, taps*M], outputs of the target's layers `cfg.target_layer_ids` in that order.
      slots, positions: int32 [T]. kept: bool [T], committed tokens; others are not written.
    """
    hidden = rms_norm(linear(features, params.w_context), params.g_context, cfg.rms_norm_eps)
    rows = [
        _keys_values(_layer(params.layers, i), cfg, hidden, positions)
        for i in range(cfg.num_hidden_layers)
    ]
    slot = jnp.where(kept, slots, context.keys.shape[1])

    def write(cache: jax.Array, new: list[jax.Array]) -> jax.Array:
        stacked = jnp.stack(new).astype(cache.dtype)
        return cache.at[:, slot, positions].set(stacked, mode="drop")

    return DenseContext(
        keys=write(context.keys, [keys for keys, _ in rows]),
        values=write(context.values, [values for _, values in rows]),
    )


def run_dense_block(
    params: DenseDraftParams,
    cfg: DenseDraftConfig,
    context: DenseContext,
    *,
    anchors: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Final-normed hidden states [R, G, M] of draft blocks.

    Args:
      anchors, positions, slots: int32 [R]: last committed token, its position, its slot. Context rows at positions
        below `positions` are visible.
    """
    g = cfg.block_size
    ids = jnp.full((anchors.shape[0], g), cfg.mask_token_id, jnp.int32).at[:, 0].set(anchors)
    places = positions[:, None] + jnp.arange(g)
    visible = jnp.arange(context.keys.shape[2]) < positions[:, None]  # [R, S]
    x = params.embed[ids]
    for i in range(cfg.num_hidden_layers):
        layer = _layer(params.layers, i)
        with jax.named_scope(f"dense_layer_{i}"):
            h = rms_norm(x, layer.g_attn, cfg.rms_norm_eps)
            past = (context.keys[i, slots], context.values[i, slots])
            x = x + _attention(layer, cfg, h, past, visible, places)
            h = rms_norm(x, layer.g_mlp, cfg.rms_norm_eps)
            gated = jax.nn.silu(linear(h, layer.w_gate)) * linear(h, layer.w_up)
            x = x + linear(gated, layer.w_down)
    return rms_norm(x, params.g_norm, cfg.rms_norm_eps)


def propose_dense(
    params: DenseDraftParams,
    cfg: DenseDraftConfig,
    context: DenseContext,
    *,
    anchors: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    choose: Chooser,
    kept: Any,
) -> Proposal:
    """Draft `cfg.block_size` tokens after `anchors`; arguments as `run_dense_block`, result as `propose`."""
    hidden = run_dense_block(
        params, cfg, context, anchors=anchors, positions=positions, slots=slots
    )
    tokens, logprobs, kept = draw_in_sequence(
        linear_f32(hidden, params.head),
        start_state(cfg, anchors.shape[0]),
        lambda state, previous, k: transition_logits(
            params.markov, cfg, state, previous, hidden[:, k]
        ),
        anchors=anchors,
        choose=choose,
        kept=kept,
    )
    return Proposal(
        tokens=tokens,
        logprobs=logprobs,
        confidences=confidences(params, cfg, hidden, tokens_before(anchors, tokens)),
        kept=kept,
    )


def _attention(
    layer: DenseLayer,
    cfg: DenseDraftConfig,
    h: jax.Array,
    past: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """h [R, G, M] attends to past keys and values [R, S, KV, D] where visible [R, S], and to the whole block."""
    keys, values = _keys_values(layer, cfg, h, positions)
    # What is not visible may hold anything, NaN too.
    shown = visible[..., None, None]
    past_keys, past_values = (jnp.where(shown, rows, 0).astype(h.dtype) for rows in past)
    keys = jnp.concatenate([past_keys, keys], axis=1).astype(jnp.float32)
    values = jnp.concatenate([past_values, values], axis=1).astype(jnp.float32)
    valid = jnp.concatenate([visible, jnp.ones(h.shape[:2], bool)], axis=1)
    q = linear(h, layer.w_q).reshape(*h.shape[:2], -1, cfg.head_dim)
    q = rotate_halves(rms_norm(q, layer.g_q, cfg.rms_norm_eps), positions, cfg.rope_theta)
    # Query heads in groups, one per key-value head.
    q = q.reshape(*h.shape[:2], cfg.num_key_value_heads, -1, cfg.head_dim).astype(jnp.float32)
    logits = jnp.einsum("rgnhd,rknd->rgnhk", q, keys) * cfg.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(valid[:, None, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("rgnhk,rknd->rgnhd", weights, values).astype(h.dtype)
    return linear(out.reshape(*h.shape[:2], -1), layer.w_o)


def _keys_values(
    layer: DenseLayer, cfg: DenseDraftConfig, h: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rotated keys and plain values [..., KV, D] of h [..., M] at positions [...]."""
    shape = (*h.shape[:-1], cfg.num_key_value_heads, cfg.head_dim)
    keys = rms_norm(linear(h, layer.w_k).reshape(shape), layer.g_k, cfg.rms_norm_eps)
    return rotate_halves(keys, positions, cfg.rope_theta), linear(h, layer.w_v).reshape(shape)


def rotate_halves(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotate x [..., H, D] by its positions [...], channel i paired with channel i + D/2. Angles are float32."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _layer(layers: DenseLayer, i: int) -> DenseLayer:
    return jax.tree.map(lambda leaf: leaf[i], layers)
