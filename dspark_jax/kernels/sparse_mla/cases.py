"""Problems for tests and benchmarks of `sparse_mla`: row lengths, contexts, sizes, random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.rows import RowFormat, empty_rows, encode


class Row(NamedTuple):
    """One request of a step: its slot's context before the step and how many tokens the step holds."""

    start: int
    tokens: int


@dataclass(frozen=True)
class Case:
    """A step for one layer. `listed` is how many entries a token may list, `few` how many it lists at most."""

    name: str
    rows: tuple[Row, ...]
    heads: int
    width: int
    window: int
    listed: int
    few: int | None = None
    padding: int = 0
    rotary: int = 0
    ratio: int = 4


NORM_EPS = 1e-6
TINY = {"heads": 3, "width": 32, "window": 8, "rotary": 8}

TEST_CASES = (
    Case("one_token", (Row(0, 1),), listed=0, **TINY),
    Case("one_late_token", (Row(37, 1),), listed=6, **TINY),
    Case("padding_only", (), listed=6, padding=2, **TINY),
    Case("mixed_lengths", (Row(5, 3), Row(0, 4), Row(63, 1)), listed=24, padding=2, **TINY),
    Case("empty_request", (Row(9, 2), Row(4, 0), Row(2, 1)), listed=6, **TINY),
    Case("no_valid_entry", (Row(20, 2),), listed=6, few=0, **TINY),
    Case("few_of_a_long_list", (Row(40, 12), Row(5, 4)), listed=64, **TINY),
    Case("much_of_a_long_list", (Row(200, 14), Row(5, 1)), listed=64, padding=1, **TINY),
    Case("chunk_longer_than_window", (Row(3, 12),), listed=6, **TINY),
)

FLASH = {"heads": 64, "width": 512, "window": 128, "rotary": 64}
PRO = {"heads": 128, "width": 512, "window": 128, "rotary": 64}


def decode_case(tokens: int, *, per_request: int = 8, listed: int = 512, **size: int) -> Case:
    """`tokens` tokens in requests of `per_request` at a context of 8192, every entry list full."""
    rows = tuple(Row(8192, n) for n in _split(tokens, per_request))
    return Case(f"decode_{tokens}", rows, listed=listed, **size)


def prefill_case(tokens: int, *, listed: int = 512, **size: int) -> Case:
    """One prompt chunk of `tokens` tokens after 8192."""
    return Case(f"prefill_{tokens}", (Row(8192, tokens),), listed=listed, **size)


def make(
    case: Case,
    seed: int,
    dtype: Any,
    *,
    pool: int | None = None,
    row_format: RowFormat = RowFormat.PLAIN,
) -> dict[str, Any]:
    """Arguments of `sparse_mla` by name, without `dispatch`. Whatever must not be read holds NaN.

    `pool` is the number of entries in the page pool, at least what the case lists. Ring and entries are in
    `row_format`.
    """
    rng = np.random.default_rng(seed)
    tokens = sum(r.tokens for r in case.rows) + case.padding
    layers, per_page = 2, 2
    slots = len(case.rows) + 1
    order = rng.permutation(slots)[: len(case.rows)]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    meta = {
        name: np.zeros(tokens, np.int32) for name in ("slots", "positions", "starts", "row_heads")
    }
    is_token = np.zeros(tokens, bool)
    counts = np.zeros(tokens, np.int32)
    window = np.full((layers, slots, case.window, case.width), np.nan, np.float32)
    step_rows = np.full((tokens, case.width), np.nan, np.float32)
    head = 0
    for slot, row in zip(order, case.rows):
        own = slice(head, head + row.tokens)
        meta["slots"][own], meta["starts"][own], meta["row_heads"][own] = slot, row.start, head
        meta["positions"][own] = row.start + np.arange(row.tokens)
        is_token[own] = True
        visible = (meta["positions"][own] + 1) // case.ratio
        counts[own] = np.minimum(visible, case.listed if case.few is None else case.few)
        held = np.arange(max(0, row.start - case.window), row.start) % case.window
        window[1, slot, held] = normal(len(held), case.width)
        step_rows[own] = normal(row.tokens, case.width)
        head += row.tokens

    entries = places = None
    if case.listed:
        pool = pool or 2 * per_page * max(4, int(counts.max(initial=0)))
        places = rng.integers(0, pool, (tokens, case.listed), dtype=np.int32)
        named = np.unique(places[np.arange(case.listed) < counts[:, None]])
        # Places beyond the count name rows of NaN, so that reading one shows.
        poison = np.setdiff1d(np.arange(pool), named)[:1]
        if len(poison):
            places = np.where(np.arange(case.listed) < counts[:, None], places, poison[0])
        flat = np.full((pool, case.width), np.nan, np.float32)
        flat[named] = normal(len(named), case.width)
        entries = np.stack([np.full_like(flat, np.nan), flat]).reshape(2, -1, per_page, case.width)
    like = empty_rows((), case.width, row_format, num_rotary=case.rotary, dtype=dtype)
    angle = rng.uniform(0, 6, (tokens, case.rotary // 2)).astype(np.float32)
    return {
        "q": jnp.asarray(normal(tokens, case.heads, case.width), dtype),
        "window": encode(jnp.asarray(window), like),
        "step_rows": jnp.asarray(step_rows, dtype),
        "entries": None if entries is None else encode(jnp.asarray(entries), like),
        "layer": jnp.int32(1),
        "entry_layer": jnp.int32(1),
        "attn_sink": jnp.asarray(normal(case.heads)),
        **jax.tree.map(jnp.asarray, meta),
        "is_token": jnp.asarray(is_token),
        "entry_places": None if places is None else jnp.asarray(places),
        "entry_counts": jnp.asarray(counts) if case.listed else None,
        "norm_eps": NORM_EPS,
        "rotation": (jnp.cos(angle), jnp.sin(angle)) if case.rotary else None,
    }


def _split(total: int, most: int) -> list[int]:
    return [most] * (total // most) + ([total % most] if total % most else [])
