"""The indexer: score a request's compressed entries for each token and keep the best."""

from __future__ import annotations

from typing import Any

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.index_topk.reference import index_topk_reference
from dspark_jax.kernels.rows import Keys


def index_topk(
    q: jax.Array,
    head_weights: jax.Array,
    index_keys: Keys,
    *,
    layer: jax.Array | int,
    page_table: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    k: int,
    tiles: jax.Array | None = None,
    dispatch: Dispatch,
) -> tuple[jax.Array, jax.Array]:
    """The k entries w < counts with the highest sum_i weight_i * relu(q_i . key_w), lowest w first on ties.

    Args:
      q: [T, Hi, I], rotated. head_weights: float32 [T, Hi], constants folded in.
      index_keys: [L, P, S, I], plain or fp8; page_table: int32 [slots, max_pages]; slots: int32 [T].
      counts: int32 [T], visible entries of the token; 0 for padding.
      tiles: what `query_tiles` says of the same slots, where several layers share it.

    Returns:
      places: int32 [T, k'] in the flat page pool (page * S + offset), k' = min(k, max_pages * S);
      selected: int32 [T] = min(counts, k'), how many of them are valid. The order within is not defined.
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.index_topk.pallas_triton import index_topk_pallas

        return index_topk_pallas(
            q,
            head_weights,
            index_keys,
            layer=layer,
            page_table=page_table,
            slots=slots,
            counts=counts,
            k=k,
            tiles=tiles,
            dispatch=dispatch,
        )
    return index_topk_reference(
        q,
        head_weights,
        index_keys,
        layer=layer,
        page_table=page_table,
        slots=slots,
        counts=counts,
        k=k,
    )


def query_tiles(
    slots: jax.Array, index_keys: Keys, page_table: jax.Array, *, dtype: Any, dispatch: Dispatch
) -> jax.Array | None:
    """How the kernel groups tokens with `slots` [T] and queries of `dtype`; None if it takes turns or is not used.

    It follows from the slots alone, so that all layers of a step can share it.
    """
    if dispatch.backend is not Backend.PALLAS:
        return None
    from dspark_jax.kernels.index_topk.pallas_triton import shared_tiles

    return shared_tiles(slots, index_keys, page_table, dtype=dtype, dispatch=dispatch)
