"""Problems for tests and benchmarks of `finish_rows` and `store_rows`, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.rows import RowFormat, empty_keys, empty_rows

LAYERS = 3


@dataclass(frozen=True)
class Case:
    """`rows` of `width` channels, the last `rotary` of which are turned. Every third row has no page."""

    name: str
    rows: int
    width: int
    rotary: int


ROWS: dict[str, int] = {"width": 512, "rotary": 64}
KEYS: dict[str, int] = {"width": 128, "rotary": 64}

TEST_CASES = (
    Case("rows", 5, **ROWS),
    Case("keys", 4, **KEYS),
    Case("one_row", 1, 32, 8),
    Case("two_blocks", 7, 84, 12),
    Case("odd_kept", 6, 25, 6),
    Case("all_rotary", 4, 16, 16),
    Case("one_pair", 3, 65, 2),
)


def make(case: Case, seed: int, dtype: Any, *, layer: int = 1) -> dict[str, Any]:
    """Arguments of `finish_rows` by name, without `like` and `dispatch`; gains of other layers are NaN.

    Rows are of every size, and so are the gains of neighbouring channels up to a hundredfold.
    """
    rng = np.random.default_rng(seed)
    raw = rng.standard_normal((case.rows, case.width)) * np.exp(rng.uniform(-5, 5, (case.rows, 1)))
    gain = np.full((LAYERS, case.width), np.nan)
    gain[layer] = np.exp(rng.uniform(-2.3, 2.3, case.width))
    angle = rng.uniform(0, 1000, (case.rows, case.rotary // 2))
    return {
        "raw": jnp.asarray(raw, dtype),
        "gain": jnp.asarray(gain, dtype),
        "layer": jnp.int32(layer),
        "eps": 1e-6,
        "angles": (
            jnp.asarray(np.cos(angle), jnp.float32),
            jnp.asarray(np.sin(angle), jnp.float32),
        ),
    }


def make_stored(
    case: Case,
    seed: int,
    dtype: Any,
    row_format: RowFormat,
    *,
    is_keys: bool = False,
    pages: int = 9,
) -> dict[str, Any]:
    """Arguments of `store_rows` by name, without `dispatch`; the pool holds NaN."""
    rng = np.random.default_rng(seed + 1)
    lead = (LAYERS, pages, 4)
    if is_keys:
        empty = partial(empty_keys, lead, case.width, row_format)
    else:
        empty = partial(empty_rows, lead, case.width, row_format, num_rotary=case.rotary)
    page, offset = np.divmod(rng.permutation(pages * lead[2])[: case.rows], lead[2])
    page[1::3] = pages
    return {
        **make(case, seed, dtype),
        "pool": empty(dtype=dtype, fill=np.nan),
        "page": jnp.asarray(page, jnp.int32),
        "offset": jnp.asarray(offset, jnp.int32),
    }


def make_exact(rows: np.ndarray, rotary: int, dtype: Any) -> dict[str, Any]:
    """Arguments of `finish_rows`, as `make`, that leave `rows` [N, D] below 2**44 as they are but for rounding.

    An eps of one hides the mean square of rows this small, and the gain is the inverse of what made them so.
    """
    pairs = (len(rows), rotary // 2)
    return {
        "raw": jnp.asarray(rows * 2.0**-60, dtype),
        "gain": jnp.full((1, rows.shape[1]), 2.0**60, jnp.float32),
        "layer": 0,
        "eps": 1.0,
        "angles": (jnp.ones(pairs), jnp.zeros(pairs)),
    }
