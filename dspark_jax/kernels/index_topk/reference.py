"""Definition of `index_topk`: scores page by page as far as the longest request reaches, then one top-k."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.kernels.rows import gather


def index_topk_reference(
    q, head_weights, index_keys, *, layer, page_table, slots, counts, k
) -> tuple[jax.Array, jax.Array]:
    """See `index_topk` for arguments and results."""
    per_page = index_keys.shape[2]
    max_pages = page_table.shape[1]
    k = min(k, max_pages * per_page)
    tables = jnp.maximum(page_table[slots], 0)  # [T, max_pages]
    wide_q = q.astype(jnp.float32)

    def score_page(page: jax.Array, scores: jax.Array) -> jax.Array:
        keys = gather(index_keys, (layer, tables[:, page])).astype(jnp.float32)  # [T, S, I]
        dots = jax.nn.relu(jnp.einsum("thi,tsi->ths", wide_q, keys))
        summed = jnp.einsum("ths,th->ts", dots, head_weights)
        visible = page * per_page + jnp.arange(per_page) < counts[:, None]
        summed = jnp.where(visible, summed, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, summed, page * per_page, axis=1)

    start = jnp.full((q.shape[0], max_pages * per_page), -jnp.inf, jnp.float32)
    pages = (jnp.max(counts) + per_page - 1) // per_page
    scores = jax.lax.fori_loop(0, pages, score_page, start)
    chosen = jax.lax.top_k(scores, k)[1]
    places = jnp.take_along_axis(tables, chosen // per_page, axis=1) * per_page + chosen % per_page
    return places.astype(jnp.int32), jnp.minimum(counts, k)
