"""What a step costs, in milliseconds, as a function of its tokens, requests and context.

A profile is a set of measured curves. A table is those curves expanded to every token and request
count, so that the budget optimiser only slices an array. The rules of expansion are those of vLLM's
adaptive verification (vllm-project/vllm#47808): a staircase where execution pads to a compiled
shape, interpolation where it doesn't.
"""

import bisect
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_jax.budget.correction import LiveCorrection

MIN_VERIFY_MS = 1e-6
SWITCH_OFF = 'switch it off with "enable_adaptive_verification": false in the speculative config'

Curve = Mapping[int, float]


def expand_curve(
    curve: Curve, size: int, *, capture_limit: int | None = None, floor_ms: float = 0.0
) -> np.ndarray:
    """Milliseconds for every count 0..size from a few measured points.

    1. The points are replaced by their running maximum: a dip caused by tile quantisation must not
       make a longer step look cheaper.
    2. Up to the last point the answer is the staircase: the value of the smallest measured count
       that holds `v`.
    3. Above `capture_limit` nothing pads: linear interpolation between the points that lie above
       the limit, and up to the first of them its own value. No blending across the limit, where the
       jump is real.
    4. Beyond the last point: the slope of the last segment, or constant if there is one point only.

    Args:
        curve: count → milliseconds, at least one point, counts >= 0, times finite.
        size: last count of the table.
        capture_limit: largest count that runs in a compiled shape; None where every count does.
        floor_ms: lower bound of every entry.

    Returns:
        float64[size + 1].

    Raises:
        ValueError: the curve is empty, a count is negative, or a time isn't finite.
    """
    _check_curve("cost", curve)
    counts = np.array(sorted(curve), dtype=np.int64)
    ms = np.maximum.accumulate([float(curve[int(count)]) for count in counts])

    at = np.arange(size + 1)
    table = ms[np.minimum(np.searchsorted(counts, at), counts.size - 1)]
    if capture_limit is not None:
        above = counts > capture_limit
        if above.any():
            table = np.where(at > capture_limit, np.interp(at, counts[above], ms[above]), table)
    if counts.size > 1:
        slope = (ms[-1] - ms[-2]) / (counts[-1] - counts[-2])
        table = np.where(at > counts[-1], ms[-1] + slope * (at - counts[-1]), table)
    return np.maximum(table, floor_ms)


@dataclass(frozen=True, kw_only=True)
class CostCurves:
    """Median times measured at one synthetic context length.

    Attributes:
        context_len: cached positions of every request during the measurement.
        verify: tokens in the step → milliseconds of the target's forward and everything but
            drafting.
        draft: requests in the step → milliseconds of one drafter pass.
    """

    context_len: int
    verify: Curve
    draft: Curve

    def __post_init__(self) -> None:
        if self.context_len < 0:
            raise ValueError(f"context_len must be >= 0, got {self.context_len}")
        _check_curve("verify", self.verify)
        _check_curve("draft", self.draft)


def _check_curve(name: str, curve: Curve) -> None:
    if not curve:
        raise ValueError(f"{name} curve without a single measurement: {SWITCH_OFF}")
    if min(curve) < 0 or not all(math.isfinite(ms) for ms in curve.values()):
        raise ValueError(f"{name} curve needs counts >= 0 and finite times, got {dict(curve)}")


class CostTable:
    """Step time by tokens, requests and context; optionally corrected by live measurements."""

    def __init__(
        self,
        curves: Sequence[CostCurves],
        *,
        max_tokens: int,
        max_requests: int,
        capture_limit: int | None = None,
        correction: LiveCorrection | None = None,
    ) -> None:
        """Expands the curves once.

        Args:
            curves: one entry per profiled context length, in any order; at least one.
            max_tokens: largest number of tokens of a step.
            max_requests: largest number of requests of a step.
            capture_limit: largest token count that pads to a compiled shape; None where all do.
            correction: learns measured / predicted per bucket; None leaves the profile as it is.

        Raises:
            ValueError: no curves, two with the same context length, or a correction that ends
                before `max_tokens`.
        """
        if not curves:
            raise ValueError(f"cost table without a profile: {SWITCH_OFF}")
        if correction is not None and correction.max_tokens < max_tokens:
            raise ValueError(
                f"live correction ends at {correction.max_tokens} tokens, the table at {max_tokens}"
            )
        ordered = sorted(curves, key=lambda c: c.context_len)
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.correction = correction
        self._context_lens = [c.context_len for c in ordered]
        if len(set(self._context_lens)) < len(ordered):
            raise ValueError(f"context lengths must differ, got {self._context_lens}")
        self._verify_ms = np.stack(
            [
                expand_curve(
                    c.verify, max_tokens, capture_limit=capture_limit, floor_ms=MIN_VERIFY_MS
                )
                for c in ordered
            ]
        )
        self._draft_ms = np.stack([expand_curve(c.draft, max_requests) for c in ordered])

    def padded_to(
        self, buckets: Sequence[int], correction: LiveCorrection | None = None
    ) -> "CostTable":
        """The table of a server that has only these of the measured token counts to run steps in.

        Args:
            buckets: increasing; the last is `max_tokens`.
            correction: for the new table, which learns nothing from this one's.

        Raises:
            ValueError: the buckets end elsewhere.
        """
        if not buckets or buckets[-1] != self.max_tokens:
            raise ValueError(f"buckets must end at {self.max_tokens} tokens, got {list(buckets)}")
        at = np.asarray(buckets)[np.searchsorted(buckets, np.arange(self.max_tokens + 1))]
        table = copy.copy(self)
        table.correction = correction
        table._verify_ms = self._verify_ms[:, at]
        return table

    def step_ms(
        self, num_tokens: int, num_requests: int, *, draft: bool, context_len: float
    ) -> float:
        """Milliseconds of one step, `draft` telling whether the drafter runs in it.

        Raises:
            ValueError: as `steps_ms`.
        """
        ms = self._profiled_step_ms(num_tokens, num_requests, draft, context_len)
        return ms if self.correction is None else ms * self.correction.ratio(num_tokens)

    def steps_ms(
        self, first: int, last: int, num_requests: int, *, draft: bool, context_len: float
    ) -> np.ndarray:
        """Milliseconds of steps of first..last tokens, both included: float64[last - first + 1].

        With a live correction the result is made non-decreasing again: ratios learned bucket by
        bucket could otherwise make a longer step look cheaper than a shorter one.

        Raises:
            ValueError: the table doesn't reach that far, which is an error of the scheduler.
        """
        self._check(first, last, num_requests)
        ms = self._profiled_ms(slice(first, last + 1), num_requests, draft, context_len)
        if self.correction is not None:
            ms = ms * self.correction.ratios(first, last)
            np.maximum.accumulate(ms, out=ms)
        return ms

    def observe(
        self,
        num_tokens: int,
        num_requests: int,
        *,
        draft: bool,
        context_len: float,
        measured_ms: float,
    ) -> None:
        """Tells the live correction, if there is one, how long a step really took."""
        if self.correction is not None:
            profiled = self._profiled_step_ms(num_tokens, num_requests, draft, context_len)
            self.correction.observe(num_tokens, predicted_ms=profiled, measured_ms=measured_ms)

    def _profiled_step_ms(
        self, num_tokens: int, num_requests: int, draft: bool, context_len: float
    ) -> float:
        self._check(num_tokens, num_tokens, num_requests)
        return float(self._profiled_ms(num_tokens, num_requests, draft, context_len))

    def _profiled_ms(
        self, tokens: int | slice, num_requests: int, draft: bool, context_len: float
    ) -> np.ndarray:
        lower, upper, weight = self._context_bracket(context_len)
        ms = self._verify_ms[lower, tokens]
        draft_ms = self._draft_ms[lower, num_requests]
        if weight > 0.0:
            ms = ms + weight * (self._verify_ms[upper, tokens] - ms)
            draft_ms = draft_ms + weight * (self._draft_ms[upper, num_requests] - draft_ms)
        return ms + draft_ms if draft else ms

    def _check(self, first: int, last: int, num_requests: int) -> None:
        if not 0 <= first <= last <= self.max_tokens:
            raise ValueError(
                f"step of {first}..{last} tokens is outside the cost table of 0..{self.max_tokens}"
            )
        if not 0 <= num_requests <= self.max_requests:
            raise ValueError(
                f"step of {num_requests} requests is outside the cost table of "
                f"0..{self.max_requests}"
            )

    def _context_bracket(self, context_len: float) -> tuple[int, int, float]:
        # Outside the profiled range the nearest profile holds: sparse attention reads a bounded
        # number of entries, so a slope measured at short contexts says little about long ones.
        lens = self._context_lens
        upper = bisect.bisect_right(lens, context_len)
        if upper in (0, len(lens)):
            nearest = min(upper, len(lens) - 1)
            return nearest, nearest, 0.0
        lower = upper - 1
        return lower, upper, (context_len - lens[lower]) / (lens[upper] - lens[lower])
