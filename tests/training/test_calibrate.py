"""Calibration undoes distortions that it can express, and its measures know chance from error."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.training.calibrate import (
    Calibration,
    calibration_error,
    error_floor,
    fit_calibration,
    ranking_quality,
    survival,
    survival_labels,
)

N = 20_000


def rounds(seed: int, scale: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits distorted by the inverse of (scale, offset), and accepted counts of the true ones."""
    draw = np.random.default_rng(seed)
    true = draw.normal(0.7, 1.2, (N, len(scale)))
    kept = draw.random(true.shape) < 1 / (1 + np.exp(-true))
    accept_lens = np.cumprod(kept, axis=1).sum(axis=1)
    return (true - offset) / scale, accept_lens


def errors(z, accept_lens, calibration):
    predicted, labels = survival(z, calibration), survival_labels(accept_lens, z.shape[1])
    return np.array([calibration_error(predicted[:, k], labels[:, k]) for k in range(z.shape[1])])


@pytest.mark.parametrize(
    ("scale", "offset"),
    [([0.4, 0.4, 0.4], [0.0, 0.0, 0.0]), ([2.0, 0.5, 1.0], [0.8, -0.6, 0.5])],
    ids=["scale", "scale and offset"],
)
def test_fit_recovers_a_known_distortion(scale, offset):
    scale, offset = np.array(scale), np.array(offset)
    z, accept_lens = rounds(0, scale, offset)
    fitted = fit_calibration(z, accept_lens)
    # Scales are tried in steps of 9 %; the offset is in units of the corrected logit.
    np.testing.assert_allclose(np.log(fitted.scale / scale), 0, atol=0.25)
    np.testing.assert_allclose(fitted.offset, offset, atol=0.25)

    fresh = rounds(1, scale, offset)
    before, after = errors(*fresh, None), errors(*fresh, fitted)
    floor = [error_floor(p) for p in survival(fresh[0], fitted).T]
    assert before.max() > 0.05
    assert (after < np.array(floor) + 0.01).all(), (after, floor)


def test_error_of_a_constant_prediction_is_its_distance_from_the_rate():
    labels = np.arange(1000) % 4 == 0
    assert calibration_error(np.full(1000, 0.6), labels) == pytest.approx(0.35)
    assert calibration_error(np.full(1000, 0.25), labels) == pytest.approx(0)


def test_floor_falls_with_the_root_of_the_sample():
    predicted = np.random.default_rng(9).random(64_000)  # not the seed of the floor's own draws
    ratio = error_floor(predicted[:4000]) / error_floor(predicted)
    assert 3 < ratio < 5.2


def test_calibration_without_distortion_is_nearly_the_identity():
    z, accept_lens = rounds(2, np.ones(3), np.zeros(3))
    identity = Calibration(np.ones(3), np.zeros(3))
    np.testing.assert_array_equal(survival(z), survival(z, identity))
    fitted = fit_calibration(z, accept_lens)
    assert np.abs(survival(z, fitted) - survival(z)).mean() < 0.02


def test_ranking_quality():
    labels = np.array([False, False, True, True])
    assert ranking_quality(np.array([0.1, 0.2, 0.3, 0.4]), labels) == 1
    assert ranking_quality(np.array([0.4, 0.3, 0.2, 0.1]), labels) == 0
    assert ranking_quality(np.full(4, 0.5), labels) == 0.5
    assert ranking_quality(np.full(4, 0.5), labels | True) is None
