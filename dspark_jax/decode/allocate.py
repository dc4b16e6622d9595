"""Divide a verification budget over all pending drafts by their fresh survival.

The host chose the budget from older confidences; here the best slots of the current proposals win. A slot never
outranks an earlier one of its own request (survival does not rise along a draft, and ties go to the earlier
position), so what admits token k depends only on tokens before k: speculative sampling stays exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def allocate(
    confidences: jax.Array,
    caps: jax.Array,
    budget: jax.Array,
    min_depth: jax.Array | int = 0,
) -> jax.Array:
    """How many drafts of each row are verified.

    Args:
      confidences: float32 [R, G], conditional acceptance of each drafted position. NaN counts as 0; values are
        clamped to [0, 1].
      caps: int32 [R], most drafts that the row may verify (0..G).
      budget: int32 scalar, most drafts verified in all.
      min_depth: int32 [R] or scalar, drafts of the row that come before all others whatever their confidence.

    Returns:
      int32 [R]: a prefix length per row, at most `caps`, summing to min(budget, sum(caps)). The winners are the
      `budget` slots first in the order (within `min_depth` first, survival descending, position ascending, row
      ascending).
    """
    rows, drafts = confidences.shape
    conditional = jnp.clip(jnp.nan_to_num(confidences, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    survival = _running_product(conditional.astype(jnp.float32))
    position = jnp.arange(drafts)
    open_ = position < caps[:, None]
    is_floor = position < jnp.broadcast_to(min_depth, (rows,))[:, None]
    # Floats >= 0 are ordered as their bits are. Those of 1.0 stay below 2^30, which leaves a bit for the floor.
    # The sign goes, because a product of zeros may carry one.
    bits = jax.lax.bitcast_convert_type(jnp.abs(survival), jnp.int32)
    keys = jnp.where(open_, -(bits + (is_floor.astype(jnp.int32) << 30)), 1)
    # Flattened position-major and sorted stably, equal survivals fall in the order position, then row.
    order = jnp.argsort(keys.T.reshape(-1), stable=True)
    rank = (
        jnp.zeros(rows * drafts, jnp.int32)
        .at[order]
        .set(jnp.arange(rows * drafts, dtype=jnp.int32))
    )
    rank = rank.reshape(drafts, rows).T
    admitted = (rank < budget) & open_
    return jnp.sum(admitted, axis=1, dtype=jnp.int32)


def _running_product(factors: jax.Array) -> jax.Array:
    """Products [R, G] of the first 1..G factors, multiplied in that order.

    The order of a parallel product is up to the compiler, and rounded in another order a longer product may exceed
    a shorter one.
    """
    products = [factors[:, 0]]
    for k in range(1, factors.shape[1]):
        products.append(products[-1] * factors[:, k])
    return jnp.stack(products, axis=1)
