"""The ratio accepted / promised against hand-counted verdicts."""

import numpy as np
import pytest

from dspark_jax.budget import AcceptanceCorrection


def test_starts_at_one_and_counts_what_was_admitted() -> None:
    correction = AcceptanceCorrection(half_life=1e12, prior=1.0)
    assert correction.ratio == 1.0
    # Row 0 promises 0.5 + 0.25, row 1 only 0.5: its other drafts were not admitted.
    confidences = np.full((2, 3), 0.5, np.float32)
    correction.observe(confidences, np.array([2, 1]), np.array([2, 0]))
    assert correction.ratio == pytest.approx(3.0 / 2.25)


def test_nothing_admitted_teaches_nothing() -> None:
    correction = AcceptanceCorrection(half_life=1.0)
    correction.observe(np.full((2, 3), 0.9, np.float32), np.zeros(2, int), np.zeros(2, int))
    assert correction.ratio == 1.0


def test_old_verdicts_fade_and_the_ratio_stays_within_its_bounds() -> None:
    correction = AcceptanceCorrection(half_life=10.0, min_ratio=0.8, max_ratio=1.5)
    confidences = np.full((10, 1), 0.25, np.float32)
    ones = np.ones(10, int)
    for _ in range(20):
        correction.observe(confidences, ones, ones)
    assert correction.ratio == 1.5
    for _ in range(20):
        correction.observe(confidences, ones, 0 * ones)
    assert correction.ratio == 0.8


def test_case_12_odd_confidences_count_as_the_allocation_takes_them() -> None:
    odd, clean = AcceptanceCorrection(), AcceptanceCorrection()
    verdict = np.array([2]), np.array([1])
    odd.observe(np.array([[np.inf, np.nan]], np.float32), *verdict)
    clean.observe(np.array([[1.0, 0.0]], np.float32), *verdict)
    assert odd.ratio == clean.ratio


@pytest.mark.parametrize(
    "arguments",
    [
        {"half_life": 0.0},
        {"prior": 0.0},
        {"min_ratio": 0.0},
        {"min_ratio": 1.1},
        {"max_ratio": 0.9},
    ],
)
def test_refuses_nonsense(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        AcceptanceCorrection(**arguments)
