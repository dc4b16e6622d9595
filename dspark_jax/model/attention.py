"""Hybrid latent attention: sliding window, compressed entries, indexer, grouped output projection.

One latent row per token is key and value of every head. The softmax runs over the window and, in compressed
layers, over entries that overlap it; outputs are rotated back because the value carries the rotation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.compress import compress
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.index_topk import index_topk
from dspark_jax.kernels.rows import Keys, Rows, scatter
from dspark_jax.kernels.sparse_mla import sparse_mla
from dspark_jax.model.batch import TokenBatch
from dspark_jax.model.cache import entry_places
from dspark_jax.model.layers import (
    linear,
    linear_by_group,
    linear_f32,
    rms_norm,
    rotary_angles,
    rotary_frequencies,
    rotate,
)
from dspark_jax.model.params import Block, Compressor, Indexer


class Frame(NamedTuple):
    """What every layer of a step shares: who the tokens are and where their rows lie."""

    batch: TokenBatch
    page_table: jax.Array  # int32 [slots, max_pages]
    dispatch: Dispatch


def latent_rows(
    h: jax.Array, block: Block, positions: jax.Array, frequencies: np.ndarray, eps: float
) -> jax.Array:
    """Rotated key-value rows [..., D] of normed inputs h [..., M], one layer's `block`, not rounded."""
    return rotate(rms_norm(linear(h, block.w_kv), block.g_kv, eps), positions, frequencies)


def query_heads(h: jax.Array, block: Block, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Query heads [..., H, D] as projected, and the normed latent [..., q_lora] they come from."""
    latent = rms_norm(linear(h, block.w_q_a), block.g_q, cfg.rms_norm_eps)
    heads = linear(latent, block.w_q_b)
    return heads.reshape(*heads.shape[:-1], cfg.num_attention_heads, cfg.head_dim), latent


def queries(
    h: jax.Array, block: Block, positions: jax.Array, frequencies: np.ndarray, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """`query_heads`, each head normed without weights and rotated: what `attend` leaves to its kernel."""
    heads, latent = query_heads(h, block, cfg)
    return rotate(rms_norm(heads, None, cfg.rms_norm_eps), positions, frequencies), latent


def project_output(
    out: jax.Array, block: Block, positions: jax.Array, frequencies: np.ndarray, cfg: ModelConfig
) -> jax.Array:
    """Heads [..., H, D] -> [..., M]: inverse rotation, then `project_heads`."""
    return project_heads(rotate(out, positions, frequencies, inverse=True), block, cfg)


def project_heads(out: jax.Array, block: Block, cfg: ModelConfig) -> jax.Array:
    """Heads [..., H, D], rotated back, -> [..., M]: one low-rank map per group of heads, one map back."""
    low = linear_by_group(out.reshape(*out.shape[:-2], cfg.o_groups, -1), block.w_o_a)
    return linear(low.reshape(*low.shape[:-2], -1), block.w_o_b)


def closing_tokens(batch: TokenBatch, ratio: int) -> jax.Array:
    """Flat tokens whose position closes a window of `ratio`, compacted: int32 [C], T where unused.

    C = T // ratio + min(R, T) bounds them: a row of n tokens closes at most n // ratio + 1 windows.
    """
    tokens = batch.token_ids.shape[0]
    most = min(tokens, tokens // ratio + batch.slots.shape[0])
    closes = batch.is_token & ((batch.positions + 1) % ratio == 0)
    return jnp.nonzero(closes, size=most, fill_value=tokens)[0].astype(jnp.int32)


def open_row(h: jax.Array, weights: Compressor, positions: jax.Array) -> jax.Array:
    """Values and gates of each token, float32 [T, 2*k*D]: what a window's pooling reads later."""
    gates = linear_f32(h, weights.w_gate) + weights.ape[positions % weights.ape.shape[0]]
    return jnp.concatenate([linear_f32(h, weights.w_kv), gates], axis=-1)


def write_entries(
    pool: Rows | Keys,
    new_rows: jax.Array,
    open_rows: jax.Array,
    weights: Compressor,
    frame: Frame,
    *,
    layer: jax.Array,
    cfg: ModelConfig,
) -> Any:
    """Pool the windows that close in this step and store their entries in pages.

    `pool` [L, P, S, D] of one kind of layer, `new_rows` this step's open rows, `open_rows` the ring stack,
    `weights` one layer's compressor, `layer` its index in the stacks. Returns the pool.
    """
    batch = frame.batch
    ratio = weights.ape.shape[0]
    tokens = batch.token_ids.shape[0]
    closing = closing_tokens(batch, ratio)
    pooled = compress(
        new_rows,
        open_rows,
        layer=layer,
        closing=closing,
        slots=batch.token_slots,
        positions=batch.positions,
        starts=batch.token_starts,
        row_heads=batch.row_heads,
        ratio=ratio,
        overlap=new_rows.shape[-1] == 4 * pool.shape[-1],
        dispatch=frame.dispatch,
    )
    token = jnp.minimum(closing, tokens - 1)
    number = batch.positions[token] // ratio
    entry = rms_norm(pooled, weights.g_norm, cfg.rms_norm_eps)
    entry = rotate(entry, number * ratio, rotary_frequencies(cfg, compressed=True))
    per_page = pool.shape[2]
    held = frame.page_table.at[batch.token_slots[token], number // per_page]
    own_page = held.get(mode="fill", fill_value=-1)
    page = jnp.where((closing < tokens) & (own_page >= 0), own_page, pool.shape[1])
    return scatter(pool, (layer, page, number % per_page), entry)


def choose_entries(
    h: jax.Array,
    latent: jax.Array,
    index_keys: Keys,
    indexer: Indexer,
    frame: Frame,
    *,
    layer: jax.Array,
    cfg: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """The indexer's choice for every token: places [T, K] and how many are valid [T]."""
    batch = frame.batch
    q = linear(latent, indexer.w_q_b).reshape(-1, cfg.index_n_heads, cfg.index_head_dim)
    q = rotate(q, batch.positions, rotary_frequencies(cfg, compressed=True))
    scale = (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    visible = jnp.where(batch.is_token, (batch.positions + 1) // cfg.csa_ratio, 0)
    return index_topk(
        q,
        linear_f32(h, indexer.w_heads) * scale,
        index_keys,
        layer=layer,
        page_table=frame.page_table,
        slots=batch.token_slots,
        counts=visible,
        k=cfg.index_topk,
        dispatch=frame.dispatch,
    )


def all_entries(pool: Rows, frame: Frame, ratio: int) -> tuple[jax.Array, jax.Array]:
    """Every visible entry of every token, for layers without an indexer: places [T, K], counts [T]."""
    batch = frame.batch
    per_page = pool.shape[2]
    numbers = jnp.arange(frame.page_table.shape[1] * per_page)
    places = entry_places(
        jnp.broadcast_to(numbers, (batch.positions.shape[0], numbers.shape[0])),
        frame.page_table,
        batch.token_slots,
        per_page,
    )
    return places, jnp.where(batch.is_token, (batch.positions + 1) // ratio, 0)


def attend(
    q: jax.Array,
    rows: jax.Array,
    window: Rows,
    block: Block,
    frame: Frame,
    *,
    layer: jax.Array,
    frequencies: np.ndarray,
    norm_eps: float,
    entries: Rows | None = None,
    entry_layer: jax.Array | int = 0,
    places: jax.Array | None = None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """Attention of every token's `query_heads` over ring, step and listed entries -> [T, H, D], rotated back."""
    batch = frame.batch
    return sparse_mla(
        q,
        window,
        rows,
        entries,
        layer=layer,
        entry_layer=entry_layer,
        attn_sink=block.attn_sink,
        slots=batch.token_slots,
        positions=batch.positions,
        starts=batch.token_starts,
        row_heads=batch.row_heads,
        is_token=batch.is_token,
        entry_places=places,
        entry_counts=counts,
        norm_eps=norm_eps,
        rotation=rotary_angles(batch.positions, frequencies),
        dispatch=frame.dispatch,
    )


def has_compressor(kind: AttentionKind) -> bool:
    """Whether a layer uses the compressed rotary table."""
    return kind is not AttentionKind.SLIDING
