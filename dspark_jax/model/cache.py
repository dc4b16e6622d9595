"""What a request keeps between steps, addressed by position so that roll-back is a shorter length.

Rings hold rows of *committed* tokens only: a step's own rows are handed around separately and enter the rings
when they are accepted. Compressed entries are written when a window closes, accepted or not; one that closed on a
rejected token is invisible (`entry < (t + 1) // m`) until its closing position is processed again and rewrites it.

Rows are rounded, where their format asks for it, when they are made: a query finds the same numbers in the step's
own rows, in the ring and in a page. Committing rounds them once more, which changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.rows import Keys, RowFormat, Rows, empty_keys, empty_rows, scatter
from dspark_jax.model.batch import TokenBatch


class Cache(struct.PyTreeNode):
    """Stacked over the layers of a kind. Arrays of kinds that a model lacks are None."""

    window: Rows  # [L, slots, W, D], ring slot = position mod W
    csa_entries: Rows | None  # [L_csa, P, S_csa, D]
    index_keys: Keys | None  # [L_csa, P, S_csa, I]
    csa_open: (
        jax.Array | None
    )  # [L_csa, slots, 2m, 4D] float32: values of both halves, then gates + ape
    index_open: jax.Array | None  # [L_csa, slots, 2m, 4I] float32
    hca_entries: Rows | None  # [L_hca, P, S_hca, D]
    hca_open: jax.Array | None  # [L_hca, slots, m, 2D] float32: values, then gates + ape


class StepRows(struct.PyTreeNode):
    """Rows that one step's tokens made, in flat token order: what `commit` moves into the rings."""

    window: jax.Array  # [L, T, D] plain, with the numbers that the ring will hold
    csa_open: jax.Array | None  # [L_csa, T, 4D] float32
    index_open: jax.Array | None  # [L_csa, T, 4I] float32
    hca_open: jax.Array | None  # [L_hca, T, 2D] float32


class PageGeometry(NamedTuple):
    """Pages shared by every compressed layer: one page covers `tokens` source positions."""

    tokens: int
    pages: int
    max_pages: int  # of one request


def page_tokens(cfg: ModelConfig) -> int:
    """Source positions per page: a multiple of both ratios, at least two heavy windows and 64 positions."""
    ratio = max(cfg.csa_ratio, cfg.hca_ratio)
    return max(2 * ratio, -(-64 // ratio) * ratio)


def init_cache(
    cfg: ModelConfig,
    *,
    slots: int,
    geometry: PageGeometry,
    dtype: Any = jnp.float32,
    row_format: RowFormat = RowFormat.PLAIN,
    fill: float = 0.0,
) -> Cache:
    """An empty cache of rows in `row_format`, plain ones in `dtype`.

    `fill` other than zero poisons it: nothing may read what was never written.
    """
    d, i = cfg.head_dim, cfg.index_head_dim
    num_csa = len(cfg.indices_of(AttentionKind.CSA))
    num_hca = len(cfg.indices_of(AttentionKind.HCA))
    for ratio in ({cfg.csa_ratio} if num_csa else set()) | ({cfg.hca_ratio} if num_hca else set()):
        if geometry.tokens % ratio:
            raise ValueError(f"page of {geometry.tokens} tokens is no multiple of ratio {ratio}")

    def rows(*lead: int) -> Any:
        rotary = cfg.qk_rope_head_dim
        return empty_rows(lead, d, row_format, num_rotary=rotary, dtype=dtype, fill=fill)

    def keys(*lead: int) -> Any:
        return empty_keys(lead, i, row_format, dtype=dtype, fill=fill)

    def open_rows(*shape: int) -> jax.Array:
        return jnp.full(shape, fill, jnp.float32)

    csa_page = (geometry.pages, geometry.tokens // cfg.csa_ratio)
    hca_page = (geometry.pages, geometry.tokens // cfg.hca_ratio)
    csa_ring, hca_ring = 2 * cfg.csa_ratio, cfg.hca_ratio
    return Cache(
        window=rows(cfg.num_hidden_layers, slots, cfg.sliding_window),
        csa_entries=rows(num_csa, *csa_page) if num_csa else None,
        index_keys=keys(num_csa, *csa_page) if num_csa else None,
        csa_open=open_rows(num_csa, slots, csa_ring, 4 * d) if num_csa else None,
        index_open=open_rows(num_csa, slots, csa_ring, 4 * i) if num_csa else None,
        hca_entries=rows(num_hca, *hca_page) if num_hca else None,
        hca_open=open_rows(num_hca, slots, hca_ring, 2 * d) if num_hca else None,
    )


def commit(cache: Cache, rows: StepRows, batch: TokenBatch, accepted: jax.Array) -> Cache:
    """Move the rows of accepted tokens into the rings.

    Args:
      accepted: int32 [R], how many of each row's tokens (from its first) are kept.

    Only the last ring-length accepted rows of a request are written, so no ring slot is written twice.
    """
    kept, behind = kept_tokens(batch, accepted)

    def write(ring: Any, new: jax.Array | None) -> Any:
        if ring is None or new is None:
            return None
        length = ring.shape[2]
        slot = jnp.where(kept & (behind < length), batch.token_slots, ring.shape[1])
        return scatter(ring, (slice(None), slot, batch.positions % length), new)

    return cache.replace(
        window=write(cache.window, rows.window),
        csa_open=write(cache.csa_open, rows.csa_open),
        index_open=write(cache.index_open, rows.index_open),
        hca_open=write(cache.hca_open, rows.hca_open),
    )


def kept_tokens(batch: TokenBatch, accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which tokens are among the first `accepted` int32 [R] of their row.

    Returns kept, bool [T], and behind, int32 [T]: how many kept tokens of the same row follow (0 for the newest).
    """
    row = jnp.maximum(batch.seq_ids, 0)
    within = batch.positions - batch.token_starts
    return batch.is_token & (within < accepted[row]), accepted[row] - 1 - within


def entry_places(
    entries: jax.Array, page_table: jax.Array, slots: jax.Array, per_page: int
) -> jax.Array:
    """Where entry numbers [..., K] of slots [...] lie in the flat page pool: page * per_page + offset.

    `page_table` is int32 [slots, max_pages]. Entries that no page holds answer with some place in the pool; the
    caller masks them by count.
    """
    page = jnp.clip(entries // per_page, 0, page_table.shape[1] - 1)
    pages = jnp.maximum(page_table[slots[..., None], page], 0)
    return pages * per_page + entries % per_page
