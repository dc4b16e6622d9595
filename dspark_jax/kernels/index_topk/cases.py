"""Problems for tests and benchmarks of `index_topk`: requests, contexts, sizes, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.rows import RowFormat, empty_keys, encode


class Row(NamedTuple):
    """`tokens` neighbouring tokens of one request, the first of which sees `visible` entries."""

    tokens: int
    visible: int


@dataclass(frozen=True)
class Case:
    """One step's choice in one layer. `ties` draws small whole numbers, so that scores are exact and collide."""

    name: str
    rows: tuple[Row, ...]
    k: int
    heads: int
    width: int
    max_pages: int
    per_page: int
    padding: int = 0
    ties: bool = False


TINY: dict[str, Any] = {"k": 4, "heads": 16, "width": 16, "max_pages": 5, "per_page": 4}

TEST_CASES = (
    Case("one_token", (Row(1, 9),), **TINY),
    Case("padding_only", (), padding=3, **TINY),
    Case("fewer_than_k", (Row(3, 2), Row(2, 0)), **TINY),
    Case("full", (Row(1, 20),), **TINY),
    Case("mixed_lengths", (Row(9, 3), Row(1, 20), Row(4, 14)), padding=2, **TINY),
    Case("ties", (Row(6, 18), Row(2, 12)), ties=True, **TINY),
)

FLASH: dict[str, Any] = {"k": 512, "heads": 64, "width": 128, "per_page": 64}
PRO: dict[str, Any] = {"k": 1024, "heads": 64, "width": 128, "per_page": 64}


def decode_case(tokens: int, entries: int, *, per_request: int = 8, **size: Any) -> Case:
    """`tokens` tokens in requests of `per_request`, each seeing `entries`."""
    rows = tuple(Row(per_request, entries) for _ in range(max(1, tokens // per_request)))
    return Case(f"decode_{tokens}x{entries}", rows, max_pages=entries // size["per_page"], **size)


def prefill_case(tokens: int, entries: int, **size: Any) -> Case:
    """One prompt chunk of `tokens` tokens, each seeing `entries`."""
    rows = (Row(tokens, entries),)
    return Case(f"prefill_{tokens}x{entries}", rows, max_pages=entries // size["per_page"], **size)


def make(
    case: Case, seed: int, dtype: Any, *, row_format: RowFormat = RowFormat.PLAIN
) -> dict[str, Any]:
    """Arguments of `index_topk` by name, without `dispatch`, keys in `row_format`.

    Keys that must not be read hold NaN.
    """
    rng = np.random.default_rng(seed)
    tokens = sum(r.tokens for r in case.rows) + case.padding
    slots = len(case.rows) + 1
    capacity = case.max_pages * case.per_page
    num_pages = slots * case.max_pages + 1

    def draw(*shape: int) -> np.ndarray:
        if case.ties:
            return rng.integers(-1, 2, shape).astype(np.float32)
        return rng.standard_normal(shape, dtype=np.float32)

    table = rng.permutation(num_pages - 1)[: slots * case.max_pages].reshape(slots, -1)
    keys = np.full((2, num_pages, case.per_page, case.width), np.nan, np.float32)
    token_slots, counts = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    head = 0
    for slot, row in zip(rng.permutation(slots), case.rows):
        token_slots[head : head + row.tokens] = slot
        counts[head : head + row.tokens] = np.minimum(
            row.visible + np.arange(row.tokens) // 4, capacity
        )
        held = counts[head : head + row.tokens].max(initial=0)
        number = np.arange(held)
        keys[1, table[slot, number // case.per_page], number % case.per_page] = draw(
            held, case.width
        )
        table[slot, -(-held // case.per_page) :] = -1
        head += row.tokens
    like = empty_keys((), case.width, row_format, dtype=dtype)
    return {
        "q": jnp.asarray(draw(tokens, case.heads, case.width), dtype),
        "head_weights": jnp.asarray(draw(tokens, case.heads)),
        "index_keys": encode(jnp.asarray(keys), like),
        "layer": jnp.int32(1),
        "page_table": jnp.asarray(table, jnp.int32),
        "slots": jnp.asarray(token_slots),
        "counts": jnp.asarray(counts),
        "k": case.k,
    }
