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
from dspark_jax.kernels.index_topk import index_topk, query_tiles
from dspark_jax.kernels.latent_rows import finish_rows, store_rows
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.kernels.rotary import turn_pairs
from dspark_jax.kernels.rows import Keys, Rows
from dspark_jax.kernels.sparse_mla import sparse_mla
from dspark_jax.kernels.sparse_mla.window import WindowLists, window_lists
from dspark_jax.model.batch import TokenBatch
from dspark_jax.model.cache import Cache, entry_places
from dspark_jax.model.layers import (
    linear,
    linear_by_group,
    linear_f32,
    rotary_angles,
    rotary_frequencies,
    rotate,
)
from dspark_jax.model.params import Block, Compressor, Indexer

Angles = tuple[jax.Array, jax.Array]
"""Cosine and sine of each rotary pair, float32 [..., R/2]."""


class Entries(NamedTuple):
    """The compressed entries of one kind of layer in a step: which arise, where they go, which are seen."""

    closing: jax.Array  # int32 [C] token that closes a window, T where unused
    page: jax.Array  # int32 [C] page for the entry, beyond the last where there is none
    offset: jax.Array  # int32 [C] place in the page
    angles: Angles  # of the position of the window's first token, [C, R/2]
    visible: jax.Array  # int32 [T] entries that a token sees, 0 for padding


class Frame(NamedTuple):
    """What every layer of a step shares, computed once: who the tokens are and where their rows lie."""

    batch: TokenBatch
    page_table: jax.Array  # int32 [slots, max_pages]
    window: WindowLists
    sliding_angles: Angles  # [T, R/2], for layers without a compressor
    compressed_angles: Angles  # [T, R/2], for layers with one
    csa: Entries | None
    csa_tiles: jax.Array | None  # runs of queries that the indexer scores together
    hca: Entries | None
    hca_places: jax.Array | None  # int32 [T, K] every entry that a token could see
    dispatch: Dispatch

    def angles(self, kind: AttentionKind) -> Angles:
        """Those of the tokens in a layer of this kind."""
        return self.compressed_angles if has_compressor(kind) else self.sliding_angles


def make_frame(
    batch: TokenBatch,
    cache: Cache,
    page_table: jax.Array,
    cfg: ModelConfig,
    dtype: Any,
    dispatch: Dispatch,
) -> Frame:
    """The frame of a step whose activations have `dtype`. XLA would compute its parts in every layer anew."""
    csa = hca = csa_tiles = hca_places = None
    if cache.csa_entries is not None:
        csa = _entries(batch, cache.csa_entries, page_table, cfg.csa_ratio, cfg)
        assert cache.index_keys is not None
        csa_tiles = query_tiles(
            batch.token_slots, cache.index_keys, page_table, dtype=dtype, dispatch=dispatch
        )
    if cache.hca_entries is not None:
        hca = _entries(batch, cache.hca_entries, page_table, cfg.hca_ratio, cfg)
        hca_places = _all_places(batch, cache.hca_entries, page_table)
    sliding, compressed = (
        rotary_angles(batch.positions, rotary_frequencies(cfg, compressed=table))
        for table in (False, True)
    )
    return Frame(
        batch=batch,
        page_table=page_table,
        window=window_lists(
            positions=batch.positions,
            starts=batch.token_starts,
            row_heads=batch.row_heads,
            is_token=batch.is_token,
            length=cache.window.shape[2],
        ),
        sliding_angles=sliding,
        compressed_angles=compressed,
        csa=csa,
        csa_tiles=csa_tiles,
        hca=hca,
        hca_places=hca_places,
        dispatch=dispatch,
    )


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


def window_rows(
    h: jax.Array,
    block: Block,
    gain: jax.Array,
    window: Rows,
    frame: Frame,
    *,
    layer: jax.Array,
    kind: AttentionKind,
    eps: float,
) -> jax.Array:
    """`latent_rows` of a step's tokens, h [T, M] -> [T, D], with the numbers that the ring `window` will hold.

    `gain` [L, D] holds all layers.
    """
    return finish_rows(
        linear(h, block.w_kv),
        gain,
        window,
        layer=layer,
        eps=eps,
        angles=frame.angles(kind),
        dispatch=frame.dispatch,
    )


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


def _entries(
    batch: TokenBatch, pool: Rows, page_table: jax.Array, ratio: int, cfg: ModelConfig
) -> Entries:
    """Entries of `ratio` tokens each in pages like those of `pool` [L, P, S, D].

    At most T // ratio + min(R, T) windows close: a row of n tokens closes at most n // ratio + 1.
    """
    tokens = batch.token_ids.shape[0]
    most = min(tokens, tokens // ratio + batch.slots.shape[0])
    closes = batch.is_token & ((batch.positions + 1) % ratio == 0)
    closing = jnp.nonzero(closes, size=most, fill_value=tokens)[0].astype(jnp.int32)
    token = jnp.minimum(closing, tokens - 1)
    number = batch.positions[token] // ratio
    pages, per_page = pool.shape[1:3]
    held = page_table.at[batch.token_slots[token], number // per_page]
    own_page = held.get(mode="fill", fill_value=-1)
    return Entries(
        closing=closing,
        page=jnp.where((closing < tokens) & (own_page >= 0), own_page, pages),
        offset=number % per_page,
        angles=rotary_angles(number * ratio, rotary_frequencies(cfg, compressed=True)),
        visible=jnp.where(batch.is_token, (batch.positions + 1) // ratio, 0),
    )


def _all_places(batch: TokenBatch, pool: Rows, page_table: jax.Array) -> jax.Array:
    """Place [T, K] of every entry of every token's request, for layers without an indexer."""
    per_page = pool.shape[2]
    numbers = jnp.arange(page_table.shape[1] * per_page)
    numbers = jnp.broadcast_to(numbers, (batch.positions.shape[0], numbers.shape[0]))
    return entry_places(numbers, page_table, batch.token_slots, per_page)


def open_row(h: jax.Array, weights: Compressor, positions: jax.Array) -> jax.Array:
    """Values and gates of each token, float32 [T, 2*k*D]: what a window's pooling reads later."""
    ratio, gates = weights.ape.shape
    added = jnp.pad(weights.ape[positions % ratio], ((0, 0), (gates, 0)))
    return linear_f32(h, weights.w_kv_gate) + added


def write_entries(
    pool: Rows | Keys,
    new_rows: jax.Array,
    open_rows: jax.Array,
    stack: Compressor,
    entries: Entries,
    frame: Frame,
    *,
    layer: jax.Array,
    cfg: ModelConfig,
) -> Any:
    """Pool the windows that close in this step and store their entries in pages.

    `pool` [L, P, S, D] of one kind of layer, `new_rows` this step's open rows, `open_rows` the ring stack,
    `stack` the compressors of that kind, `entries` its entries, `layer` the index in all stacks.

    Returns the pool.
    """
    batch = frame.batch
    pooled = compress(
        new_rows,
        open_rows,
        layer=layer,
        closing=entries.closing,
        slots=batch.token_slots,
        positions=batch.positions,
        starts=batch.token_starts,
        row_heads=batch.row_heads,
        ratio=stack.ape.shape[1],
        overlap=new_rows.shape[-1] == 4 * pool.shape[-1],
        dispatch=frame.dispatch,
    )
    return store_rows(
        pool,
        pooled,
        stack.g_norm,
        layer=layer,
        page=entries.page,
        offset=entries.offset,
        eps=cfg.rms_norm_eps,
        angles=entries.angles,
        dispatch=frame.dispatch,
    )


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
    batch, entries = frame.batch, frame.csa
    assert entries is not None
    q = linear(latent, indexer.w_q_b).reshape(-1, cfg.index_n_heads, cfg.index_head_dim)
    q = turn_pairs(q, *(a[:, None] for a in frame.compressed_angles))
    scale = (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    return index_topk(
        q,
        linear_f32(h, indexer.w_heads) * scale,
        index_keys,
        layer=layer,
        page_table=frame.page_table,
        slots=batch.token_slots,
        counts=entries.visible,
        k=cfg.index_topk,
        tiles=frame.csa_tiles,
        dispatch=frame.dispatch,
    )


def attend(
    q: jax.Array,
    rows: jax.Array,
    window: Rows,
    block: Block,
    frame: Frame,
    *,
    layer: jax.Array,
    kind: AttentionKind,
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
        lists=frame.window,
        norm_eps=norm_eps,
        rotation=frame.angles(kind),
        dispatch=frame.dispatch,
    )


def has_compressor(kind: AttentionKind) -> bool:
    """Whether a layer uses the compressed rotary table."""
    return kind is not AttentionKind.SLIDING
