"""Definition of `sparse_mla`: gather every listed row, one float32 softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SHORT = 16
"""Entries from which on a quarter of the list is worth a case of its own."""


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
    unrotate=None,
) -> jax.Array:
    """See `sparse_mla` for arguments and result."""
    tokens, _, width = q.shape
    length = window.shape[2]
    span = positions[:, None] - length + 1 + jnp.arange(length)  # [T, W] absolute positions
    from_ring = span < starts[:, None]
    in_window = (span >= 0) & is_token[:, None]

    def attend(count: int) -> jax.Array:
        """The output from the window and the first `count` listed entries."""
        ring = window[layer, slots[:, None], span % length]
        step = step_rows[jnp.clip(row_heads[:, None] + span - starts[:, None], 0, tokens - 1)]
        keys, valid = jnp.where(from_ring[..., None], ring, step.astype(ring.dtype)), in_window
        if count:
            pool = entries.reshape(entries.shape[0], -1, width)
            keys = jnp.concatenate([keys, pool[entry_layer, entry_places[:, :count]]], axis=1)
            in_count = jnp.arange(count) < entry_counts[:, None]
            valid = jnp.concatenate([valid, in_count & is_token[:, None]], axis=1)
        # A row that is not valid may hold anything, NaN too: it must not reach a product.
        keys = jnp.where(valid[..., None], keys, 0).astype(jnp.float32)
        # Keys first: a CPU multiplies [K, D] by [D, H] twice as fast as [H, D] by the transpose of many keys.
        logits = jnp.einsum("tkd,thd->tkh", keys, q.astype(jnp.float32)) * width**-0.5
        logits = jnp.where(valid[..., None], logits, -jnp.inf)
        top = jnp.maximum(jnp.max(logits, axis=1), attn_sink)
        weights = jnp.exp(logits - top[:, None])
        total = jnp.sum(weights, axis=1) + jnp.exp(attn_sink - top)
        return jnp.einsum("tkh,tkd->thd", weights, keys) / total[..., None]

    listed = 0 if entry_places is None else entry_places.shape[1]
    short = listed // 4
    if short < _SHORT:
        out = attend(listed)
    else:
        # Lists are as long as the longest request may become; most requests are far shorter.
        is_short = jnp.max(entry_counts) <= short
        out = jax.lax.cond(is_short, lambda: attend(short), lambda: attend(listed))
    if unrotate is not None:
        cos, sin = (angle[:, None] for angle in unrotate)  # [T, 1, R/2]
        kept, tail = jnp.split(out, [width - 2 * cos.shape[-1]], axis=-1)
        even, odd = tail[..., 0::2], tail[..., 1::2]
        turned = jnp.stack([even * cos + odd * sin, odd * cos - even * sin], axis=-1)
        out = jnp.concatenate([kept, turned.reshape(tail.shape)], axis=-1)
    return out.astype(q.dtype)
