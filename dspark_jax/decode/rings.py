"""What a request needs of its slot to go on where a page ends: copied out, and later into another slot.

Pages are shared as they are. Of the rest, positions, anchors and proposals are made anew by the row that goes on,
and sampling belongs to the request. Open rows of heavy windows are left out: none is open where a page ends.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.decode.state import DecodeState
from dspark_jax.kernels.rows import Rows


class Rings(struct.PyTreeNode):
    """Of a state's slots, or of snapshots: axis 1 of every array. Arrays that a model lacks are None."""

    window: Rows  # [L, slots, W, D]
    csa_open: jax.Array | None  # [L_csa, slots, 2m, 4D] float32
    index_open: jax.Array | None  # [L_csa, slots, 2m, 4I] float32
    draft_window: jax.Array | None  # [stages, slots, W, D]


def rings_of(state: DecodeState) -> Rings:
    """The rings of all slots."""
    cache = state.cache
    return Rings(
        window=cache.window,
        csa_open=cache.csa_open,
        index_open=cache.index_open,
        draft_window=state.draft_window,
    )


def with_rings(state: DecodeState, rings: Rings) -> DecodeState:
    """The state with other rings in all slots."""
    cache = state.cache.replace(
        window=rings.window, csa_open=rings.csa_open, index_open=rings.index_open
    )
    return state.replace(cache=cache, draft_window=rings.draft_window)


def init_snapshots(state: DecodeState, count: int) -> Rings:
    """Places for copies of `count` slots of a state like this, which may be abstract; zeros."""

    def places(ring: Any) -> jax.Array:
        return jnp.zeros((ring.shape[0], count, *ring.shape[2:]), ring.dtype)

    return jax.tree.map(places, rings_of(state))


def copy_rings(into: Rings, source: Rings, place: jax.Array, origin: jax.Array) -> Rings:
    """Put at `place` of `into` what `source` has at `origin`, int32 scalars. In place if `into` is donated."""

    def copy(ring: jax.Array, other: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(other, origin, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(ring, one, place, axis=1)

    return jax.tree.map(copy, into, source)
