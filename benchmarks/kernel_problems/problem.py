"""What the kernel benchmark needs to know of one problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

Run = Callable[[Any, jax.Array], Any]


@dataclass
class Problem:
    """One line of the table.

    `run(arguments, i)` is timed; i picks a layer of the stacks. `check` returns the largest error of one call
    relative to the reference's largest value. `variants` are other tile sizes, timed by `--tune`. `peers` give
    the time of another implementation in ms.
    """

    kernel: str
    case: str
    arguments: Any
    run: Run
    check: Callable[[], float]
    num_bytes: float
    flops: float
    expected_ms: float
    tile: Any = None
    limit: float = 2e-2
    variants: dict[str, Run] = field(default_factory=dict)
    peers: dict[str, Callable[[], float]] = field(default_factory=dict)


def relative_error(actual: Any, expected: Any) -> float:
    """Largest difference over the largest expected value; infinite where either is not finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def nearest(tiles: list[Any], default: Any, *, most: int) -> list[Any]:
    """Tiles that differ from the default in 1 to `most` sizes, nearest first."""
    distances = [(_differing(tile, default), n, tile) for n, tile in enumerate(tiles)]
    return [tile for distance, _, tile in sorted(distances) if 0 < distance <= most]


def _differing(a: Any, b: Any) -> int:
    """In how many sizes two tiles differ."""
    return sum(x != y for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b)))


def label(tile: Any) -> str:
    """Short text of a tile's numbers."""
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(tile).items())
