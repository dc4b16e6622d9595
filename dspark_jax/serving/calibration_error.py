"""Running calibration error of the drafter's confidences."""

from __future__ import annotations

import numpy as np

from dspark_jax.budget import clean_confidences


class CalibrationError:
    """Expected calibration error over equal-width bins with exponentially forgotten counts.

    ECE = sum_b n_b / n * |mean confidence_b - acceptance rate_b| (Guo et al. 2017, equation 5),
    where a draft counts once it was verified with its whole prefix accepted: that is what a
    conditional confidence predicts. After `half_life` drafts a count has half its weight.
    """

    def __init__(self, num_bins: int = 10, half_life: float = 10000.0) -> None:
        self._half_life = half_life
        self._sums = np.zeros((3, num_bins))  # drafts, confidence, accepted

    def update(self, confidences: np.ndarray, admitted: np.ndarray, accepted: np.ndarray) -> None:
        """Add verified proposals: conditional `confidences` float [N, G], counts int [N].

        Confidences count as the allocation takes them: NaN as 0, the rest clamped to [0, 1].
        """
        position = np.arange(confidences.shape[1])
        # The position after the last accepted one was tried, too, if it was admitted.
        tried = (position <= accepted[:, None]) & (position < admitted[:, None])
        confidence = clean_confidences(confidences[tried])
        hit = np.broadcast_to(position < accepted[:, None], tried.shape)[tried]
        num_bins = self._sums.shape[1]
        bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
        self._sums *= 0.5 ** (len(confidence) / self._half_life)
        for row, weights in enumerate((None, confidence, hit)):
            self._sums[row] += np.bincount(bins, weights, num_bins)

    @property
    def value(self) -> float:
        """The error, 0 (calibrated) to 1; 0 before the first draft."""
        drafts, confidence, accepted = self._sums
        return float(np.abs(confidence - accepted).sum() / max(drafts.sum(), 1e-9))
