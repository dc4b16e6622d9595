"""Live correction of a cost table: how far real steps are from their profile."""

import math
from collections.abc import Sequence

import numpy as np


class LiveCorrection:
    """Bounded ratio measured / predicted for every token bucket, as an exponential average.

    A profile is taken once, on synthetic tokens and at one or two context lengths. Real batches
    differ (routing of experts, cache residency, clocks), and the difference drifts. A bucket
    without observations of its own uses the ratio pooled over all observations; otherwise a
    slow-down common to all shapes would make the buckets nobody has visited look cheap.
    """

    def __init__(
        self,
        token_buckets: Sequence[int],
        max_tokens: int,
        *,
        rate: float = 0.1,
        min_ratio: float = 0.5,
        max_ratio: float = 2.0,
    ) -> None:
        """
        Args:
            token_buckets: compiled token counts, ascending; a step belongs to the smallest that
                holds it.
            max_tokens: last token count that will be asked for; above the last bucket, the last
                bucket's ratio.
            rate: weight of a new observation, 0 < rate <= 1.
            min_ratio: an observation below it counts as this, so that one odd step can't do much
                harm.
            max_ratio: likewise above.

        Raises:
            ValueError: unordered buckets, or bounds that don't enclose 1.
        """
        edges = np.asarray(token_buckets, dtype=np.int64)
        if edges.size == 0 or edges[0] < 1 or (np.diff(edges) <= 0).any():
            raise ValueError(f"token_buckets must ascend from at least 1, got {edges.tolist()}")
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must be in (0, 1], got {rate}")
        if not 0.0 < min_ratio <= 1.0 <= max_ratio:
            raise ValueError(f"ratio bounds must enclose 1, got {min_ratio}..{max_ratio}")
        self.max_tokens = max_tokens
        self.rate = rate
        self.min_ratio = min_ratio
        self.max_ratio = max_ratio
        self.num_ignored = 0
        self.pooled_ratio = 1.0
        self._bucket_of = np.minimum(
            np.searchsorted(edges, np.arange(max_tokens + 1)), edges.size - 1
        )
        self._ratios = np.ones(edges.size)
        self._is_seen = np.zeros(edges.size, dtype=bool)

    def observe(self, num_tokens: int, *, predicted_ms: float, measured_ms: float) -> None:
        """Learns from one step; a time that isn't positive and finite only counts in `num_ignored`.

        `predicted_ms` is the uncorrected prediction: a correction of a correction would not settle.
        """
        if not (math.isfinite(measured_ms) and measured_ms > 0.0 and predicted_ms > 0.0):
            self.num_ignored += 1
            return
        ratio = min(max(measured_ms / predicted_ms, self.min_ratio), self.max_ratio)
        bucket = self._bucket_of[num_tokens]
        start = self._ratios[bucket] if self._is_seen[bucket] else self.pooled_ratio
        self._ratios[bucket] = start + self.rate * (ratio - start)
        self._is_seen[bucket] = True
        self.pooled_ratio += self.rate * (ratio - self.pooled_ratio)
        self._ratios[~self._is_seen] = self.pooled_ratio

    def ratio(self, num_tokens: int) -> float:
        """Ratio for a step of that many tokens."""
        return float(self._ratios[self._bucket_of[num_tokens]])

    def ratios(self, first: int, last: int) -> np.ndarray:
        """Ratio for each of first..last tokens (both included), float64[last - first + 1]."""
        return self._ratios[self._bucket_of[first : last + 1]]
