"""The last steps of a latent row: norm, rotation, rounding as the cache stores it, its place among pages."""

from __future__ import annotations

from typing import Any

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.latent_rows.reference import finish_rows_reference, store_rows_reference
from dspark_jax.kernels.rows import Keys, Rows


def finish_rows(
    raw: jax.Array,
    gain: jax.Array,
    like: Rows,
    *,
    layer: jax.Array | int,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    dispatch: Dispatch,
) -> jax.Array:
    """Rows normed, rotated, and rounded as `like` would store them: what every query reads of them.

    normed = raw / sqrt(mean(raw^2) + eps) * gain[layer], in float32, cast to the dtype of `raw`. Of its last R
    channels each pair (a, b) becomes (a cos - b sin, b cos + a sin), in float32, cast likewise.

    Args:
      raw: [N, D]. gain: [L, D]. angles: cosines and sines, float32 [N, R/2] each.
      like: any array of `Rows`; its shape does not matter.

    Returns:
      [N, D] in the dtype of `raw`. Rounding them again changes nothing.
    """
    arguments = (raw, gain, like, *angles)
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.latent_rows.pallas_triton import finish_rows_pallas

        return finish_rows_pallas(*arguments, layer=layer, eps=eps, dispatch=dispatch)
    return finish_rows_reference(*arguments, layer=layer, eps=eps)


def store_rows(
    pool: Rows | Keys,
    raw: jax.Array,
    gain: jax.Array,
    *,
    layer: jax.Array | int,
    page: jax.Array,
    offset: jax.Array,
    eps: float,
    angles: tuple[jax.Array, jax.Array],
    dispatch: Dispatch,
) -> Any:
    """`finish_rows`, written into `pool` [L, P, S, D] at (layer, page, offset) in the pool's format.

    Rows whose page is not below P are not written. In place if `pool` is donated or a loop's carry.

    Args:
      page, offset: int32 [N], no place twice among the pages below P. Others: as for `finish_rows`.

    Returns:
      The pool.
    """
    arguments = (pool, raw, gain, page, offset, *angles)
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.latent_rows.pallas_triton import store_rows_pallas

        return store_rows_pallas(*arguments, layer=layer, eps=eps, dispatch=dispatch)
    return store_rows_reference(*arguments, layer=layer, eps=eps)
