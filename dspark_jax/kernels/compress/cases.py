"""Problems for tests and benchmarks of `compress`: row lengths, contexts, sizes, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Row(NamedTuple):
    """One request of a step: its slot's context before the step and how many tokens the step holds."""

    start: int
    tokens: int


@dataclass(frozen=True)
class Case:
    """One step's closing windows in one layer."""

    name: str
    rows: tuple[Row, ...]
    ratio: int
    overlap: bool
    width: int
    padding: int = 0


TEST_CASES = (
    Case("nothing_closes", (Row(4, 2),), ratio=4, overlap=True, width=16),
    Case("first_window", (Row(0, 4),), ratio=4, overlap=True, width=16),
    Case("mixed", (Row(5, 3), Row(0, 9), Row(6, 1)), ratio=4, overlap=True, width=24, padding=2),
    Case("no_overlap", (Row(5, 3), Row(0, 9), Row(6, 2)), ratio=8, overlap=False, width=16),
    Case("many_windows", (Row(2, 43), Row(3, 1)), ratio=4, overlap=True, width=16),
    Case("padding_only", (), ratio=4, overlap=True, width=16, padding=3),
)

CSA = {"ratio": 4, "overlap": True, "width": 512}
HCA = {"ratio": 128, "overlap": False, "width": 512}


def decode_case(tokens: int, *, per_request: int = 8, **size: Any) -> Case:
    """`tokens` tokens in requests of `per_request` at contexts around 8192."""
    rows = tuple(Row(8192 - 3 * i, per_request) for i in range(max(1, tokens // per_request)))
    return Case(f"decode_{tokens}", rows, **size)


def make(case: Case, seed: int) -> dict[str, Any]:
    """Arguments of `compress` by name, without `dispatch`. Whatever must not be read holds NaN."""
    rng = np.random.default_rng(seed)
    tokens = sum(r.tokens for r in case.rows) + case.padding
    k = 2 if case.overlap else 1
    ring, slots = k * case.ratio, len(case.rows) + 1
    open_rows = np.full((2, slots, ring, 2 * k * case.width), np.nan, np.float32)
    step_rows = np.full((tokens, 2 * k * case.width), np.nan, np.float32)
    meta = {
        name: np.zeros(tokens, np.int32) for name in ("slots", "positions", "starts", "row_heads")
    }
    closing: list[int] = []
    head = 0
    for slot, row in zip(rng.permutation(slots), case.rows):
        own = slice(head, head + row.tokens)
        meta["slots"][own], meta["starts"][own], meta["row_heads"][own] = slot, row.start, head
        meta["positions"][own] = position = row.start + np.arange(row.tokens)
        closing += (head + np.flatnonzero((position + 1) % case.ratio == 0)).tolist()
        held = np.arange(max(0, row.start - ring + 1), row.start) % ring
        open_rows[1, slot, held] = rng.standard_normal((len(held), open_rows.shape[-1]))
        step_rows[own] = rng.standard_normal((row.tokens, step_rows.shape[-1]))
        head += row.tokens
    most = max(1, min(tokens, tokens // case.ratio + len(case.rows)))
    closing += [tokens] * (most - len(closing))
    return {
        "step_rows": jnp.asarray(step_rows),
        "open_rows": jnp.asarray(open_rows),
        "layer": jnp.int32(1),
        "closing": jnp.asarray(closing, jnp.int32),
        **{name: jnp.asarray(value) for name, value in meta.items()},
        "ratio": case.ratio,
        "overlap": case.overlap,
    }
