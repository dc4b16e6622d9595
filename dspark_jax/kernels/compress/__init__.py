"""Gated pooling of a run of tokens into one compressed entry, where a token of this step closes the run."""

from __future__ import annotations

import jax

from dspark_jax.kernels.compress.reference import compress_reference
from dspark_jax.kernels.dispatch import Backend, Dispatch


def compress(
    step_rows: jax.Array,
    open_rows: jax.Array,
    *,
    layer: jax.Array | int,
    closing: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    starts: jax.Array,
    row_heads: jax.Array,
    ratio: int,
    overlap: bool,
    dispatch: Dispatch,
) -> jax.Array:
    """Per-channel softmax of the gates over a window's rows, applied to the values; before norm and rotation.

    A row holds k*D values then k*D gates (ape added), k = 2 if `overlap`. Entry closed by position p = m*w+m-1:
    without overlap the rows p-m+1 .. p; with overlap the rows p-2m+1 .. p-m with channels [0:D) and the rows
    p-m+1 .. p with channels [D:2D). Rows at negative positions have no weight. A row at or after `start` comes
    from `step_rows[row_head + position - start]`, an earlier one from `open_rows[layer, slot, position mod ring]`.

    Args:
      step_rows: float32 [T, 2*k*D]. open_rows: float32 [L, slots, ring, 2*k*D], ring = k*m.
      closing: int32 [C] flat tokens whose position closes a window; T marks an unused place.
      slots, positions, starts, row_heads: int32 [T].

    Returns:
      float32 [C, D]; unused places hold finite rubbish.
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.compress.pallas_triton import compress_pallas

        run = compress_pallas
        extra = {"dispatch": dispatch}
    else:
        run, extra = compress_reference, {}
    return run(
        step_rows,
        open_rows,
        layer=layer,
        closing=closing,
        slots=slots,
        positions=positions,
        starts=starts,
        row_heads=row_heads,
        ratio=ratio,
        overlap=overlap,
        **extra,
    )
