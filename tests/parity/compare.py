"""The one place that says how close two arrays must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Bound on a difference: absolute or relative, whichever is wider, and on the angle.

    ``cosine_gap`` bounds ``1 - cos`` between the flattened arrays; it catches a small
    systematic error that an elementwise bound sized for outliers lets through.
    """

    absolute: float
    relative: float
    cosine_gap: float


EXACT = Tolerance(0.0, 0.0, 1e-12)
"""The same arithmetic in the same order."""

FLOAT32_OP = Tolerance(2e-6, 1e-5, 1e-10)
"""One float32 operation on values near one, summed in another order."""

FLOAT32_MODEL = Tolerance(2e-5, 2e-5, 1e-9)
"""Logits of a small whole model in float32, with a standard deviation near one."""

FLOAT32_UNROLLED = Tolerance(1e-4, 1e-4, 1e-8)
"""As FLOAT32_MODEL for weights drawn anew each run, a few of which amplify rounding."""

BFLOAT16_OP = Tolerance(2e-2, 2e-2, 1e-4)
"""One operation with bfloat16 inputs or outputs and float32 accumulation."""

BFLOAT16_MODEL = Tolerance(1e-1, 1e-1, 1e-3)
"""A small whole model in bfloat16, given that no discrete choice flips."""


def assert_close(actual: Any, expected: Any, tolerance: Tolerance, name: str = "array") -> None:
    """Raise ``AssertionError`` unless ``actual`` is within ``tolerance`` of ``expected``.

    Takes NumPy, JAX or PyTorch arrays of any dtype. Shapes must be equal. NaN must coincide with
    NaN, and infinity with infinity of the same sign. The message gives the worst coordinate.
    """
    actual, expected = to_float64(actual), to_float64(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {actual.shape}, expected {expected.shape}")
    finite = np.isfinite(expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    special_differs = ~same & ~(finite & np.isfinite(actual))
    if special_differs.any():
        bad = tuple(map(int, np.argwhere(special_differs)[0]))
        raise AssertionError(
            f"{name}: non-finite values differ, first at {bad}: {actual[bad]}, "
            f"expected {expected[bad]}"
        )
    if not finite.any():
        return
    actual, expected = np.where(finite, actual, 0.0), np.where(finite, expected, 0.0)
    difference = np.abs(actual - expected)
    bound = np.maximum(tolerance.absolute, tolerance.relative * np.abs(expected))
    excess = difference - bound
    if excess.max() > 0:
        worst = tuple(map(int, np.unravel_index(excess.argmax(), excess.shape)))
        raise AssertionError(
            f"{name}: {int((excess > 0).sum())} of {excess.size} values out of bounds, worst at "
            f"{worst}: {actual[worst]:.9g}, expected {expected[worst]:.9g}, difference "
            f"{difference[worst]:.3g} > {bound[worst]:.3g}"
        )
    gap = cosine_gap(actual.ravel(), expected.ravel())
    if gap > tolerance.cosine_gap:
        raise AssertionError(
            f"{name}: cosine gap {gap:.3g} > {tolerance.cosine_gap:.3g}, largest difference "
            f"{difference.max():.3g}"
        )


def cosine_gap(actual: np.ndarray, expected: np.ndarray) -> float:
    """``1 - cos`` of two flat arrays; 0 where both are zero, 1 where only one is."""
    lengths = np.linalg.norm(actual), np.linalg.norm(expected)
    if 0.0 in lengths:
        return 0.0 if lengths[0] == lengths[1] else 1.0
    # Half the squared distance of the unit vectors keeps digits that 1 - cos would cancel.
    return float(0.5 * np.square(actual / lengths[0] - expected / lengths[1]).sum())


def to_float64(array: Any) -> np.ndarray:
    """Convert a NumPy, JAX or PyTorch array of any dtype to NumPy float64."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array).astype(np.float64)
