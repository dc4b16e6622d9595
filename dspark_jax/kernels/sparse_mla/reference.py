"""Definition of `sparse_mla`: every token gathers its listed rows, one float32 softmax."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.kernels.norm import rms_norm
from dspark_jax.kernels.rotary import turn_pairs
from dspark_jax.kernels.rows import by_place, gather

# Tokens whose gathered rows a CPU works on together: more would not stay in its cache.
_BLOCK = 32
# Short texts have few entries; lists of a longer model are then cut to this many before they are gathered.
_FEW_ENTRIES = 32


class _Token(NamedTuple):
    """What one token brings; all tokens' in front while they are together."""

    q: jax.Array  # [H, D]
    slot: jax.Array
    position: jax.Array
    start: jax.Array
    row_head: jax.Array
    is_token: jax.Array
    entry_places: jax.Array  # [K]
    entry_count: jax.Array
    rotation: tuple[jax.Array, jax.Array] | None  # [R/2] each


def sparse_mla_reference(
    q,
    window,
    step_rows,
    entries,
    *,
    layer,
    entry_layer,
    attn_sink,
    slots,
    positions,
    starts,
    row_heads,
    is_token,
    entry_places,
    entry_counts,
    norm_eps,
    rotation=None,
) -> jax.Array:
    """See `sparse_mla` for arguments and result."""
    count, _, width = q.shape
    if norm_eps is not None:
        q = rms_norm(q, None, norm_eps)
        if rotation is not None:
            q = turn_pairs(q, *(a[:, None] for a in rotation))
    length = window.shape[2]
    pool = None
    if entries is None:
        entry_places, entry_counts = jnp.zeros((count, 0), jnp.int32), jnp.zeros(count, jnp.int32)
    else:
        pool = by_place(entries)

    def attend(token: _Token) -> jax.Array:
        span = token.position - length + 1 + jnp.arange(length)  # [W] absolute positions
        ring = gather(window, (layer, token.slot, span % length))
        step = step_rows[jnp.clip(token.row_head + span - token.start, 0, count - 1)]
        keys = jnp.where((span < token.start)[:, None], ring, step.astype(ring.dtype))
        valid = (span >= 0) & token.is_token
        if pool is not None:
            keys = jnp.concatenate([keys, gather(pool, (entry_layer, token.entry_places))])
            in_count = jnp.arange(token.entry_places.shape[0]) < token.entry_count
            valid = jnp.concatenate([valid, in_count & token.is_token])
        # A row that is not valid may hold anything, NaN too: it must not reach a product.
        keys = jnp.where(valid[:, None], keys, 0).astype(jnp.float32)
        # Keys first: a CPU multiplies [K, D] by [D, H] twice as fast as [H, D] by the transpose of many keys.
        logits = jnp.einsum("kd,hd->kh", keys, token.q.astype(jnp.float32)) * width**-0.5
        logits = jnp.where(valid[:, None], logits, -jnp.inf)
        top = jnp.maximum(jnp.max(logits, axis=0), attn_sink)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0) + jnp.exp(attn_sink - top)
        out = jnp.einsum("kh,kd->hd", weights, keys) / total[:, None]
        if token.rotation is not None:
            cos, sin = token.rotation
            out = turn_pairs(out, cos, -sin)
        return out.astype(q.dtype)

    def attend_all(places: jax.Array) -> jax.Array:
        bounds = (slots, positions, starts, row_heads, is_token)
        tokens = _Token(q, *bounds, places, entry_counts, rotation)
        if count <= _BLOCK:
            return jax.vmap(attend)(tokens)
        return jax.lax.map(attend, tokens, batch_size=_BLOCK)

    # A step of one token has little to gather, and XLA would copy the pool of entries into the branches.
    if count == 1 or entry_places.shape[1] <= 2 * _FEW_ENTRIES:
        return attend_all(entry_places)
    return jax.lax.cond(
        jnp.max(entry_counts) <= _FEW_ENTRIES,
        lambda: attend_all(entry_places[:, :_FEW_ENTRIES]),
        lambda: attend_all(entry_places),
    )
