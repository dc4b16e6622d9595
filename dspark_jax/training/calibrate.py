"""Sequential temperature scaling of the drafter's confidences, and the measures that judge it.

The survival of position k is the product of the conditional confidences up to k, and its label is whether at least
k drafts were accepted. One position after the other gets the scale, and the offset if it needs one, that make the
expected calibration error of its survival least while the earlier positions stay fixed (DSpark paper, section on
calibration; the offset is ours).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NUM_BINS = 20
_RANKING_BINS = 1000
_SCALES = np.geomspace(1 / 8, 8, 49)
_HALVINGS = 24
_MAX_OFFSET = 8.0
_FLOOR_DRAWS = 20


class Calibration(NamedTuple):
    """Conditional confidence of position k = sigmoid(scale[k] * z + offset[k])."""

    scale: np.ndarray  # [G] float32
    offset: np.ndarray  # [G] float32


def survival(z: np.ndarray, calibration: Calibration | None = None) -> np.ndarray:
    """Survival float64 [N, G] of confidence logits [N, G], raw if there is no calibration."""
    z = z.astype(np.float64)
    if calibration is not None:
        z = z * calibration.scale + calibration.offset
    return np.cumprod(_sigmoid(z), axis=1)


def survival_labels(accept_lens: np.ndarray, positions: int) -> np.ndarray:
    """Whether each position was accepted with its whole prefix: bool [N, positions]."""
    return accept_lens[:, None] > np.arange(positions)


def calibration_error(predicted: np.ndarray, labels: np.ndarray) -> float:
    """ECE over equal-width bins of predictions [N] in [0, 1] against labels [N] (Guo et al. 2017)."""
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gap = np.bincount(bins, predicted, NUM_BINS) - np.bincount(bins, labels, NUM_BINS)
    return float(np.abs(gap).sum() / len(predicted))


def error_floor(predicted: np.ndarray, seed: int = 0) -> float:
    """Mean ECE that perfectly calibrated predictions [N] would show, because labels are random."""
    draw = np.random.default_rng(seed)
    errors = [
        calibration_error(predicted, draw.random(len(predicted)) < predicted)
        for _ in range(_FLOOR_DRAWS)
    ]
    return float(np.mean(errors))


def ranking_quality(predicted: np.ndarray, labels: np.ndarray) -> float | None:
    """AUROC of predictions [N] in [0, 1] for labels [N], ties within a thousandth; None if all labels agree."""
    bins = np.minimum((predicted * _RANKING_BINS).astype(np.int64), _RANKING_BINS - 1)
    hits = np.bincount(bins[labels], minlength=_RANKING_BINS).astype(np.float64)
    misses = np.bincount(bins[~labels], minlength=_RANKING_BINS).astype(np.float64)
    pairs = hits.sum() * misses.sum()
    below = np.cumsum(misses) - misses
    return float((hits * (below + misses / 2)).sum() / pairs) if pairs else None


def fit_calibration(z: np.ndarray, accept_lens: np.ndarray) -> Calibration:
    """Fit on confidence logits [N, G] and accepted counts [N] of proposals that were verified in full length."""
    positions = z.shape[1]
    labels = survival_labels(accept_lens, positions)
    scale, offset = np.ones(positions), np.zeros(positions)
    prefix = np.ones(len(z))
    for k in range(positions):
        logits, hits = z[:, k].astype(np.float64), labels[:, k]
        # A scale alone first: an offset has to be better, not only as good.
        choices = [(s, 0.0) for s in _SCALES]
        choices += [(s, _balancing_offset(s * logits, prefix, hits)) for s in _SCALES]
        errors = [calibration_error(prefix * _sigmoid(s * logits + o), hits) for s, o in choices]
        scale[k], offset[k] = choices[int(np.argmin(errors))]
        prefix = prefix * _sigmoid(scale[k] * logits + offset[k])
    return Calibration(scale.astype(np.float32), offset.astype(np.float32))


def _balancing_offset(logits: np.ndarray, prefix: np.ndarray, hits: np.ndarray) -> float:
    """Offset with which the mean survival is the share of hits, by bisection."""
    low, high = -_MAX_OFFSET, _MAX_OFFSET
    share = hits.mean()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if np.mean(prefix * _sigmoid(logits + middle)) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(z, -60, 60)))
