"""Definition of `finish_rows` and `store_rows`."""

from __future__ import annotations

from typing import Any

import jax

from dspark_jax.kernels.norm import rms_norm
from dspark_jax.kernels.rotary import turn_pairs
from dspark_jax.kernels.rows import as_stored, scatter


def finish_rows_reference(raw, gain, like, cos, sin, *, layer, eps) -> jax.Array:
    """See `finish_rows` for arguments and result."""
    return as_stored(_rotated(raw, gain[layer], cos, sin, eps), like)


def store_rows_reference(pool, raw, gain, page, offset, cos, sin, *, layer, eps) -> Any:
    """See `store_rows` for arguments and result."""
    return scatter(pool, (layer, page, offset), _rotated(raw, gain[layer], cos, sin, eps))


def _rotated(
    raw: jax.Array, gain: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> jax.Array:
    """Rows [N, D] normed with gain [D] and rotated, in the dtype of `raw`."""
    return turn_pairs(rms_norm(raw, gain, eps), cos, sin)
