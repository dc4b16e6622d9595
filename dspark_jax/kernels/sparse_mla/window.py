"""The rows of a token's sliding window as lists, which follow from positions alone and serve every layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WindowLists(NamedTuple):
    """The sliding window of every token as the kernel takes it: first the ring's places, then the step's."""

    ring_places: jax.Array  # int32 [T, W]
    ring_counts: jax.Array  # int32 [T] how many of them are listed
    step_places: jax.Array  # int32 [T, W]
    step_counts: jax.Array  # int32 [T]


def window_lists(
    *,
    positions: jax.Array,
    starts: jax.Array,
    row_heads: jax.Array,
    is_token: jax.Array,
    length: int,
) -> WindowLists:
    """Lists of a window of `length` positions; the arguments are those of `sparse_mla`."""
    first_seen = jnp.maximum(positions - length + 1, 0)
    first_step = jnp.maximum(first_seen, starts)
    ahead = jnp.arange(length)
    return WindowLists(
        ring_places=(first_seen[:, None] + ahead) % length,
        ring_counts=jnp.where(is_token, first_step - first_seen, 0),
        step_places=(row_heads + first_step - starts)[:, None] + ahead,
        step_counts=jnp.where(is_token, positions + 1 - first_step, 0),
    )
