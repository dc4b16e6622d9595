"""Definition of `sparse_mla`: gather every listed row, one float32 softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
    ring = window[layer, slots[:, None], span % length]
    step = step_rows[jnp.clip(row_heads[:, None] + span - starts[:, None], 0, tokens - 1)]
    keys = jnp.where(from_ring[..., None], ring, step.astype(ring.dtype))
    valid = (span >= 0) & is_token[:, None]
    if entries is not None:
        pool = entries.reshape(entries.shape[0], -1, width)
        listed = pool[entry_layer, entry_places]
        in_count = jnp.arange(entry_places.shape[1]) < entry_counts[:, None]
        keys = jnp.concatenate([keys, listed], axis=1)
        valid = jnp.concatenate([valid, in_count & is_token[:, None]], axis=1)
    # A row that is not valid may hold anything, NaN too: it must not reach a product.
    keys = jnp.where(valid[..., None], keys, 0).astype(jnp.float32)
    # Keys first: a CPU multiplies [K, D] by [D, H] twice as fast as [H, D] by the transpose of many keys.
    logits = jnp.einsum("tkd,thd->tkh", keys, q.astype(jnp.float32)) * width**-0.5
    logits = jnp.where(valid[..., None], logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=1), attn_sink)
    weights = jnp.exp(logits - top[:, None])
    total = jnp.sum(weights, axis=1) + jnp.exp(attn_sink - top)
    out = jnp.einsum("tkh,tkd->thd", weights, keys) / total[..., None]
    if unrotate is not None:
        cos, sin = (angle[:, None] for angle in unrotate)  # [T, 1, R/2]
        kept, tail = jnp.split(out, [width - 2 * cos.shape[-1]], axis=-1)
        even, odd = tail[..., 0::2], tail[..., 1::2]
        turned = jnp.stack([even * cos + odd * sin, odd * cos - even * sin], axis=-1)
        out = jnp.concatenate([kept, turned.reshape(tail.shape)], axis=-1)
    return out.astype(q.dtype)
