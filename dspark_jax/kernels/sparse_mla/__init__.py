"""Attention of each token over the rows that are listed for it: one latent row serves as key and value."""

from __future__ import annotations

from functools import partial

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.rows import Rows
from dspark_jax.kernels.sparse_mla.reference import sparse_mla_reference
from dspark_jax.kernels.sparse_mla.window import WindowLists


def sparse_mla(
    q: jax.Array,
    window: Rows,
    step_rows: jax.Array,
    entries: Rows | None,
    *,
    layer: jax.Array | int,
    entry_layer: jax.Array | int,
    attn_sink: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    starts: jax.Array,
    row_heads: jax.Array,
    is_token: jax.Array,
    entry_places: jax.Array | None,
    entry_counts: jax.Array | None,
    norm_eps: float | None,
    lists: WindowLists | None = None,
    rotation: tuple[jax.Array, jax.Array] | None = None,
    dispatch: Dispatch,
) -> jax.Array:
    """softmax([u . k * D^-1/2, sink]) over three sources of rows k, applied to the same rows; sink has no value.

    u = rotated(q * rsqrt(mean(q^2) + norm_eps)) for each head, and the output is rotated back. Without `norm_eps`
    q is u already.

    Sources of token t of a request whose first token in this step stands at position `start`:
      ring   positions t-W+1 .. start-1, from `window[layer, slot, position mod W]`
      step   positions max(start, t-W+1) .. t, from `step_rows[row_head + position - start]`
      pages  the first `entry_counts` of `entry_places`, from `entries[entry_layer]` flattened over pages

    Args:
      q: [T, H, D], as projected. window: [L, slots, W, D] in any format. step_rows: [T, D], plain.
      entries: [L_e, P, S, D] in the format of `window`, or None for a sliding-only layer;
        entry_places: int32 [T, K] into P*S;
        entry_counts: int32 [T].
      attn_sink: float32 [H], not scaled.
      slots, positions, starts, row_heads: int32 [T]; is_token: bool [T], False for padding.
      lists: the `window_lists` of these, where several layers share them; else they are made here.
      rotation: cos and sin, float32 [T, R/2]: by these angles the last R channels of a query are turned, in
        interleaved pairs, and those of the output turned back, because a value carries the rotation of its
        position. None leaves both.

    Returns:
      [T, H, D] in the dtype of q; zeros for padding. Softmax and sums are float32. Every real token has at least
      itself, so there is no empty row. (DeepSeek-V4 report, hybrid attention; sinks in the denominator only.)
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.sparse_mla.pallas_triton import sparse_mla_pallas

        run = partial(sparse_mla_pallas, lists=lists, dispatch=dispatch)
    else:
        run = sparse_mla_reference
    return run(
        q,
        window,
        step_rows,
        entries,
        layer=layer,
        entry_layer=entry_layer,
        attn_sink=attn_sink,
        slots=slots,
        positions=positions,
        starts=starts,
        row_heads=row_heads,
        is_token=is_token,
        entry_places=entry_places,
        entry_counts=entry_counts,
        norm_eps=norm_eps,
        rotation=rotation,
    )
