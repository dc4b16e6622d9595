"""One token further for many sequences of one length, with dense position-addressed caches.

The same model as `training.forward`; a test compares the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import AttentionKind, ModelConfig, RouterKind
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model import hyper
from dspark_jax.model.attention import has_compressor, latent_rows, project_output, queries
from dspark_jax.model.layers import linear, rotary_frequencies, rotate
from dspark_jax.model.params import Block, Compressor, Indexer, Params
from dspark_jax.training.attention import kth_largest
from dspark_jax.training.layers import collapse, enter, experts, leave, mix, wide_linear

_MASKED = -1e30


class Pool(NamedTuple):
    """State of one compressor: open rows by position modulo the ring, entries by window."""

    open_rows: jax.Array  # [B, ring, 2, k*D] float32 values and gates; ring = k * ratio
    entries: jax.Array  # [B, W, D]


class LayerCache(NamedTuple):
    """What one layer remembers of every sequence."""

    rows: jax.Array  # [B, window, D] sliding rows by position modulo the window
    pool: Pool | None
    index_pool: Pool | None


def empty_caches(cfg: ModelConfig, batch: int, length: int, dtype: Any) -> list[LayerCache]:
    """Caches of every layer for `batch` sequences of `length` tokens."""

    def pool(ratio: int, width: int, *, overlap: bool) -> Pool:
        k = 2 if overlap else 1
        # Window 0 has no window before it: its gates there must vanish.
        gates = jnp.full((batch, k * ratio, k * width), _MASKED)
        return Pool(
            open_rows=jnp.stack([jnp.zeros_like(gates), gates], axis=2),
            entries=jnp.zeros((batch, max(length // ratio, 1), width), dtype),
        )

    def layer(kind: AttentionKind) -> LayerCache:
        main = index = None
        if kind is AttentionKind.CSA:
            main = pool(cfg.csa_ratio, cfg.head_dim, overlap=True)
            index = pool(cfg.csa_ratio, cfg.index_head_dim, overlap=True)
        elif kind is AttentionKind.HCA:
            main = pool(cfg.hca_ratio, cfg.head_dim, overlap=False)
        rows = jnp.zeros((batch, cfg.sliding_window, cfg.head_dim), dtype)
        return LayerCache(rows, main, index)

    return [layer(kind) for kind in cfg.attention_kinds]


def step(
    params: Params,
    cfg: ModelConfig,
    caches: list[LayerCache],
    token_ids: jax.Array,
    position: jax.Array,
    *,
    fused: bool,
) -> tuple[jax.Array, jax.Array, list[LayerCache]]:
    """One token further: token_ids [B] at one common `position`.

    Returns the final hidden state [B, M], the drafter's taps [B, taps, M] (none without `cfg.draft`), and the
    caches that hold the tokens.
    """
    tap_layers = cfg.draft.target_layer_ids if cfg.draft else ()
    taps = [jnp.zeros((len(token_ids), 0, cfg.hidden_size), params.embed.dtype)]
    streams = hyper.spread(params.embed[token_ids][:, None], cfg.hc_mult)
    at = position[None, None]
    updated = []
    for i, kind in enumerate(cfg.layers):
        block = jax.tree.map(lambda x, i=i: x[i], params.blocks)
        weights = mix(streams, block.hyper_attn, cfg, fused=fused)
        h = rms_norm(enter(streams, weights), block.g_attn, cfg.rms_norm_eps)
        own = cfg.attention_kinds[:i].count(kind.attention)
        compressors = _compressors(params, kind.attention, own)
        out, cache = _attention(h, block, compressors, caches[i], kind.attention, cfg, at)
        updated.append(cache)
        streams = leave(streams, out, weights)
        weights = mix(streams, block.hyper_ffn, cfg, fused=fused)
        h = rms_norm(enter(streams, weights), block.g_ffn, cfg.rms_norm_eps)
        chosen = None
        if kind.router is RouterKind.HASH:
            assert params.tid2eid is not None
            chosen = params.tid2eid[i][token_ids[:, None]]
            chosen = jax.nn.one_hot(chosen, cfg.n_routed_experts, dtype=bool).any(axis=-2)
        out, _ = experts(h, block, cfg, chosen=chosen)
        streams = leave(streams, out, weights)
        if i in tap_layers:
            taps.append(jnp.mean(streams, axis=2, dtype=jnp.float32).astype(streams.dtype))
    hidden = rms_norm(collapse(streams, params.hyper_head, cfg), params.g_norm, cfg.rms_norm_eps)
    return hidden[:, 0], jnp.concatenate(taps, axis=1), updated


def _compressors(
    params: Params, kind: AttentionKind, own: int
) -> tuple[Compressor | None, Indexer | None]:
    def take(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[own], tree)

    if kind is AttentionKind.CSA:
        return take(params.csa), take(params.indexer)
    return (take(params.hca) if kind is AttentionKind.HCA else None), None


def _attention(
    h: jax.Array,
    block: Block,
    compressors: tuple[Compressor | None, Indexer | None],
    cache: LayerCache,
    kind: AttentionKind,
    cfg: ModelConfig,
    at: jax.Array,
) -> tuple[jax.Array, LayerCache]:
    """Attention block of h [B, 1, M] at position `at` [1, 1]."""
    position = at[0, 0]
    frequencies = rotary_frequencies(cfg, compressed=has_compressor(kind))
    q, latent = queries(h, block, at, frequencies, cfg)
    row = latent_rows(h, block, at, frequencies, cfg.rms_norm_eps)
    rows = _write(cache.rows, row, position % cfg.sliding_window)
    keys, seen = [rows], [jnp.arange(cfg.sliding_window) <= position]
    pool = index_pool = None
    compressor, indexer = compressors
    if compressor is not None:
        assert cache.pool is not None
        pool = _advance(cache.pool, h, compressor, cfg, position)
        ratio = compressor.ape.shape[0]
        visible = jnp.arange(pool.entries.shape[1]) < (position + 1) // ratio
        if indexer is not None:
            assert cache.index_pool is not None
            index_pool = _advance(cache.index_pool, h, indexer.compressor, cfg, position)
            visible = _choose(h, latent, indexer, index_pool.entries, visible, cfg, at)
        keys.append(pool.entries)
        seen.append(visible)
    batch = len(h)
    valid = jnp.concatenate([jnp.broadcast_to(s, (batch, s.shape[-1])) for s in seen], axis=-1)
    out = _attend(q[:, 0], jnp.concatenate(keys, axis=1), valid, block.attn_sink)
    out = project_output(out[:, None], block, at, frequencies, cfg)
    return out, LayerCache(rows, pool, index_pool)


def _write(ring: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
    """Put row [B, 1, ...] into slot `slot` of ring [B, slots, ...]."""
    return jax.lax.dynamic_update_slice_in_dim(ring, row.astype(ring.dtype), slot, axis=1)


def _advance(
    pool: Pool, h: jax.Array, weights: Compressor, cfg: ModelConfig, position: jax.Array
) -> Pool:
    """Add the token's open row; store an entry if the token closes a window."""
    ratio, width = weights.ape.shape[0], weights.g_norm.shape[0]
    values, gates = jnp.split(wide_linear(h, weights.w_kv_gate), 2, axis=-1)
    gates += weights.ape[position % ratio]
    ring = pool.open_rows.shape[1]
    open_rows = _write(pool.open_rows, jnp.stack([values, gates], axis=2), position % ring)
    # Oldest first: the rows of the window before, if the kind overlaps, then those of the window itself.
    ordered = jnp.roll(open_rows, -(position + 1), axis=1)
    if ring == 2 * ratio:
        early, late = ordered[:, :ratio, :, :width], ordered[:, ratio:, :, width:]
        ordered = jnp.concatenate([early, late], axis=1)
    pooled = jnp.sum(jax.nn.softmax(ordered[:, :, 1], axis=1) * ordered[:, :, 0], axis=1)
    number = position // ratio
    entry = rms_norm(pooled[:, None], weights.g_norm, cfg.rms_norm_eps)
    start = (number * ratio)[None, None]
    entry = rotate(entry, start, rotary_frequencies(cfg, compressed=True))
    number = jnp.minimum(number, pool.entries.shape[1] - 1)
    old = jax.lax.dynamic_slice_in_dim(pool.entries, number, 1, axis=1)
    closes = (position + 1) % ratio == 0
    kept = jnp.where(closes, entry.astype(old.dtype), old)
    return Pool(open_rows, _write(pool.entries, kept, number))


def _choose(
    h: jax.Array,
    latent: jax.Array,
    indexer: Indexer,
    index_keys: jax.Array,
    visible: jax.Array,
    cfg: ModelConfig,
    at: jax.Array,
) -> jax.Array:
    """The indexer's choice among visible entries: bool [B, W]."""
    q = linear(latent, indexer.w_q_b)
    q = q.reshape(*q.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
    q = rotate(q, at, rotary_frequencies(cfg, compressed=True))[:, 0]
    heads = wide_linear(h[:, 0], indexer.w_heads) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    products = jax.nn.relu(jnp.einsum("bhi,bwi->bhw", q, index_keys)).astype(jnp.float32)
    scores = jnp.where(visible, jnp.sum(products * heads[..., None], axis=1), _MASKED)
    return visible & (scores >= kth_largest(scores, cfg.index_topk)[:, None])


def _attend(q: jax.Array, keys: jax.Array, valid: jax.Array, sink: jax.Array) -> jax.Array:
    """q [B, H, D] over keys [B, K, D] where valid [B, K], with a sink logit per head."""
    scores = jnp.einsum("bhd,bkd->bhk", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, None], scores * q.shape[-1] ** -0.5, _MASKED)
    top = jnp.maximum(jnp.max(scores, axis=-1), sink)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink - top)
    out = jnp.einsum(
        "bhk,bkd->bhd", weights.astype(q.dtype), keys, preferred_element_type=jnp.float32
    )
    return (out / total[..., None]).astype(q.dtype)
