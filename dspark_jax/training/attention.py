"""Attention over whole sequences, differentiable: window, compressed entries and the indexer's choice.

Queries meet keys in chunks of one window plus all compressed entries, which costs little more for a row of 2048
tokens than a full square of scores would for 512.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.kernels.order import ordered_bits
from dspark_jax.model.attention import has_compressor, latent_rows, project_output, queries
from dspark_jax.model.layers import linear, rotary_frequencies, rotate
from dspark_jax.model.params import Block, Compressor, Indexer
from dspark_jax.training.layers import wide_linear

_MASKED = -1e30


def attention(
    h: jax.Array,
    block: Block,
    kind: AttentionKind,
    compressor: Compressor | None,
    indexer: Indexer | None,
    cfg: ModelConfig,
    *,
    positions: jax.Array,
    select: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention block of h [B, S, M] at positions [1, S].

    With `select`, a scalar bool, an indexer's choice hides the other entries. Returns the output [B, S, M] and
    the indexer's divergence from attention, a scalar, if there is an indexer.
    """
    frequencies = rotary_frequencies(cfg, compressed=has_compressor(kind))
    q, latent = queries(h, block, positions, frequencies, cfg)
    rows = latent_rows(h, block, positions, frequencies, cfg.rms_norm_eps)
    entries = visible = index_scores = kl = None
    if compressor is not None:
        entries = pool_entries(h, compressor, cfg)
        visible = _visible(positions, compressor.ape.shape[0], entries.shape[1])
        if indexer is not None:
            index_scores = _index_scores(h, latent, indexer, cfg, positions)
            index_scores = jnp.where(visible, index_scores, _MASKED)
            threshold = jax.lax.cond(
                select,
                lambda s: kth_largest(s, cfg.index_topk),
                lambda s: jnp.full(s.shape[:-1], _MASKED),
                jax.lax.stop_gradient(index_scores),
            )
            visible = visible & (index_scores >= threshold[..., None])
    out, mass = _attend(q, rows, entries, visible, block.attn_sink, cfg.sliding_window)
    if index_scores is not None:
        assert mass is not None
        assert visible is not None
        kl = _divergence(jax.lax.stop_gradient(mass), index_scores, visible)
    return project_output(out, block, positions, frequencies, cfg), kl


def pool_entries(h: jax.Array, weights: Compressor, cfg: ModelConfig) -> jax.Array:
    """Compressed entries [B, S // m, D] of h [B, S, M]; the tokens of an unfinished window give none."""
    ratio, width = weights.ape.shape[0], weights.g_norm.shape[0]
    windows = h.shape[1] // ratio
    whole = h[:, : windows * ratio]
    rows = wide_linear(whole, weights.w_kv_gate).reshape(len(h), windows, ratio, -1)
    values, gates = jnp.split(rows, 2, axis=-1)
    gates += weights.ape
    if values.shape[-1] == 2 * width:
        # The first half of a token's channels belongs to the window after its own; window 0 has none before it.
        before = ((0, 0), (1, 0), (0, 0), (0, 0))
        late_values = jnp.pad(values[:, :-1, :, :width], before)
        late_gates = jnp.pad(gates[:, :-1, :, :width], before, constant_values=_MASKED)
        values = jnp.concatenate([late_values, values[..., width:]], axis=2)
        gates = jnp.concatenate([late_gates, gates[..., width:]], axis=2)
    pooled = jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)
    entries = rms_norm(pooled, weights.g_norm, cfg.rms_norm_eps)
    starts = jnp.arange(windows)[None] * ratio
    return rotate(entries, starts, rotary_frequencies(cfg, compressed=True)).astype(h.dtype)


def _visible(positions: jax.Array, ratio: int, entries: int) -> jax.Array:
    """Entry w is seen from the token that closes its window on: bool [1, S, W]."""
    return jnp.arange(entries) < ((positions + 1) // ratio)[..., None]


def _index_scores(
    h: jax.Array, latent: jax.Array, indexer: Indexer, cfg: ModelConfig, positions: jax.Array
) -> jax.Array:
    """Indexer scores float32 [B, S, W] of every entry; no gradient reaches the inputs."""
    h, latent = jax.lax.stop_gradient((h, latent))
    frequencies = rotary_frequencies(cfg, compressed=True)
    q = linear(latent, indexer.w_q_b)
    q = q.reshape(*q.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
    q = rotate(q, positions, frequencies)
    keys = pool_entries(h, indexer.compressor, cfg)
    heads = wide_linear(h, indexer.w_heads) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    products = jax.nn.relu(jnp.einsum("bshi,bwi->bshw", q, keys))
    return jnp.sum(products.astype(jnp.float32) * heads[..., None], axis=2)


def kth_largest(scores: jax.Array, k: int) -> jax.Array:
    """The k-th largest of float32 scores [..., W] -> [...], exactly, by bisection on the bits of the values.

    Sorting is many times slower on a GPU. With fewer than k scores the smallest possible value comes out.
    """
    if scores.shape[-1] <= k:
        return jnp.full(scores.shape[:-1], _MASKED)
    ordered = ordered_bits(scores)

    def halve(_, bounds):
        low, high = bounds  # low is reached by k scores, high is not
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.sum(ordered >= middle[..., None], axis=-1) >= k
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.full(scores.shape[:-1], jnp.iinfo(jnp.int32).min)
    high = jnp.full(scores.shape[:-1], jnp.iinfo(jnp.int32).max)
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(jnp.where(low < 0, low ^ 0x7FFFFFFF, low), jnp.float32)


def _attend(
    q: jax.Array,
    rows: jax.Array,
    entries: jax.Array | None,
    visible: jax.Array | None,
    sink: jax.Array,
    window: int,
) -> tuple[jax.Array, jax.Array | None]:
    """One softmax over the sliding window, the visible entries and the sink.

    q [B, S, H, D], rows [B, S, D], entries [B, W, D], visible bool [B or 1, S, W]. Returns the output
    [B, S, H, D] and each entry's probability summed over heads, float32 [B, S, W].
    """
    batch, length, heads, width = q.shape
    chunks = length // window
    scale = width**-0.5
    near = rows.reshape(batch, chunks, window, width)
    before = jnp.pad(near[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    keys = jnp.concatenate([before, near], axis=2)
    chunked = q.reshape(batch, chunks, window, heads, width)
    near_logits = scale * jnp.einsum(
        "bcqhd,bckd->bcqhk", chunked, keys, preferred_element_type=jnp.float32
    )
    age = np.arange(window)[:, None] + window - np.arange(2 * window)[None]
    seen = (age >= 0) & (age < window)
    first = seen & (np.arange(2 * window) >= window)
    seen = np.stack([first] + [seen] * (chunks - 1))[None, :, :, None, :]
    near_logits = jnp.where(seen, near_logits, _MASKED).reshape(batch, length, heads, 2 * window)
    top = jnp.maximum(jnp.max(near_logits, axis=-1), sink)
    if entries is not None:
        assert visible is not None
        far_logits = scale * jnp.einsum(
            "bshd,bwd->bshw", q, entries, preferred_element_type=jnp.float32
        )
        far_logits = jnp.where(visible[:, :, None, :], far_logits, _MASKED)
        top = jnp.maximum(top, jnp.max(far_logits, axis=-1))
    top = jax.lax.stop_gradient(top)
    near_weights = jnp.exp(near_logits - top[..., None])
    total = jnp.sum(near_weights, axis=-1) + jnp.exp(sink - top)
    out = jnp.einsum(
        "bcqhk,bckd->bcqhd",
        near_weights.astype(q.dtype).reshape(batch, chunks, window, heads, 2 * window),
        keys,
        preferred_element_type=jnp.float32,
    ).reshape(batch, length, heads, width)
    mass = None
    if entries is not None:
        far_weights = jnp.exp(far_logits - top[..., None])
        total = total + jnp.sum(far_weights, axis=-1)
        out = out + jnp.einsum(
            "bshw,bwd->bshd",
            far_weights.astype(q.dtype),
            entries,
            preferred_element_type=jnp.float32,
        )
        mass = jnp.sum(far_weights / total[..., None], axis=2)
    return (out / total[..., None]).astype(q.dtype), mass


def _divergence(mass: jax.Array, scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Mean KL from attention's distribution over entries [B, S, W] to the softmax of the indexer's scores."""
    target = mass / (jnp.sum(mass, axis=-1, keepdims=True) + 1e-20)
    predicted = jax.nn.log_softmax(jnp.where(visible, scores, _MASKED), axis=-1)
    terms = target * (jnp.log(target + 1e-20) - predicted)
    return jnp.sum(jnp.where(visible, terms, 0.0)) / (mass.shape[0] * mass.shape[1])
