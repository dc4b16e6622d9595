"""Streams of proposals for the simulator: confidences, and how many drafts the target would
accept."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

# About 3.9 tokens per step when everything is verified, as published for DeepSeek-V4-Flash.
FLASH_SURVIVAL = (0.84, 0.68, 0.53, 0.38, 0.26, 0.16, 0.09)


class Trace(Protocol):
    """Proposals of requests in slots; every slot has a request of its own."""

    draft_len: int

    def restart(self, slots: np.ndarray) -> None:
        """A new request begins in each of the slots, int[N]."""
        ...

    def propose(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Next proposal of each slot: confidences float32[N, G], and accepted drafts if all were
        verified, int[N]."""
        ...


class SyntheticTrace:
    """Calibrated confidences with a given mean survival, spread over requests and correlated over
    steps.

    The log-odds of every position are its offset, plus what is particular to the request, plus a
    slowly varying term (first-order autoregressive over proposals), plus noise of the position.
    Offsets are fitted so that mean survival is as asked. Drafts are accepted with exactly the
    probability stated.
    """

    REQUEST_SPREAD = 0.9
    STEP_SPREAD = 0.7
    POSITION_SPREAD = 0.5
    STEP_CORRELATION = 0.5
    NUM_FIT_SAMPLES = 20_000

    def __init__(self, num_slots: int, survival: Sequence[float], rng: np.random.Generator) -> None:
        """
        Args:
            num_slots: slots, all of which begin with a request.
            survival: mean probability that positions 0..i are all accepted; descending within (0,
                1).
            rng: source of all randomness but the fit, which doesn't depend on it.

        Raises:
            ValueError: `survival` isn't such a sequence.
        """
        self.draft_len = len(survival)
        self._rng = rng
        self._offsets = self._fit_offsets(survival)
        self._quantile = rng.random()
        self._request_term = np.zeros(num_slots)
        self._step_term = np.zeros(num_slots)
        self.restart(np.arange(num_slots))

    def restart(self, slots: np.ndarray) -> None:
        # Quantiles visited in steps of the golden ratio: already a few requests are a fair sample,
        # so that arms which get through different numbers of them can be compared.
        for slot in slots:
            self._quantile = (self._quantile + (np.sqrt(5.0) - 1.0) / 2.0) % 1.0
            term = NormalDist().inv_cdf(min(max(self._quantile, 1e-6), 1.0 - 1e-6))
            self._request_term[slot] = self.REQUEST_SPREAD * term
        self._step_term[slots] = self.STEP_SPREAD * self._rng.standard_normal(slots.size)

    def propose(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        innovation = np.sqrt(1.0 - self.STEP_CORRELATION**2) * self.STEP_SPREAD
        self._step_term[slots] *= self.STEP_CORRELATION
        self._step_term[slots] += innovation * self._rng.standard_normal(slots.size)
        shared = self._request_term[slots] + self._step_term[slots]
        noise = self._rng.standard_normal((slots.size, self.draft_len))
        confidences = _sigmoid(self._offsets + shared[:, None] + self.POSITION_SPREAD * noise)
        confidences = confidences.astype(np.float32)
        return confidences, _accept_lens(confidences, self._rng)

    @classmethod
    def _fit_offsets(cls, survival: Sequence[float]) -> np.ndarray:
        bounded = [1.0, *survival, 0.0]
        if len(survival) == 0 or any(a <= b for a, b in itertools.pairwise(bounded)):
            raise ValueError(f"survival must descend strictly within (0, 1), got {tuple(survival)}")
        rng = np.random.default_rng(0)
        shared = np.hypot(cls.REQUEST_SPREAD, cls.STEP_SPREAD) * rng.standard_normal(
            cls.NUM_FIT_SAMPLES
        )
        reached = np.ones(cls.NUM_FIT_SAMPLES)
        offsets = []
        for target in survival:
            term = shared + cls.POSITION_SPREAD * rng.standard_normal(cls.NUM_FIT_SAMPLES)
            low, high = -30.0, 30.0
            for _ in range(50):
                middle = (low + high) / 2
                if np.mean(reached * _sigmoid(middle + term)) < target:
                    low = middle
                else:
                    high = middle
            offsets.append(low)
            reached = reached * _sigmoid(low + term)
        return np.array(offsets)


class RecordedTrace:
    """Replay of recorded proposals: every slot plays a recorded request from its start, then
    another one.

    Requests are drawn at random. Without recorded outcomes a draft is accepted with its confidence
    as probability, which takes the confidences to be calibrated.
    """

    def __init__(
        self,
        num_slots: int,
        request_ids: np.ndarray,
        confidences: np.ndarray,
        accept_lens: np.ndarray | None,
        rng: np.random.Generator,
    ) -> None:
        """
        Args:
            num_slots: slots, all of which begin with a request.
            request_ids: [N], request of each proposal; a request's proposals are in order.
            confidences: float32[N, G], conditional.
            accept_lens: int[N], drafts the target accepted when all were verified; None where not
                recorded.
            rng: chooses requests, and outcomes that weren't recorded.

        Raises:
            ValueError: there is no proposal, or lengths differ.
        """
        if confidences.ndim != 2 or not confidences.shape[0]:
            raise ValueError(f"recorded confidences must be [N, G], got {confidences.shape}")
        lengths = {len(request_ids), len(confidences)}
        lengths |= set() if accept_lens is None else {len(accept_lens)}
        if len(lengths) > 1:
            raise ValueError(f"recorded arrays must have equal lengths, got {sorted(lengths)}")
        self.draft_len = confidences.shape[1]
        self._rng = rng
        order = np.argsort(request_ids, kind="stable")
        self._confidences = confidences[order].astype(np.float32)
        self._accept_lens = None if accept_lens is None else accept_lens[order]
        _, self._starts, counts = np.unique(
            request_ids[order], return_index=True, return_counts=True
        )
        self._ends = self._starts + counts
        self._next = np.zeros(num_slots, dtype=np.int64)
        self._end = np.zeros(num_slots, dtype=np.int64)
        self.restart(np.arange(num_slots))

    def restart(self, slots: np.ndarray) -> None:
        chosen = self._rng.integers(self._starts.size, size=slots.size)
        self._next[slots], self._end[slots] = self._starts[chosen], self._ends[chosen]

    def propose(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.restart(slots[self._next[slots] >= self._end[slots]])
        at = self._next[slots]
        self._next[slots] += 1
        confidences = self._confidences[at]
        if self._accept_lens is None:
            return confidences, _accept_lens(confidences, self._rng)
        return confidences, self._accept_lens[at]


def load_recorded(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Recorded proposals as (request_ids, confidences float32[N, G], accept_lens or None).

    `.npz` has arrays `request_ids`, `confidences` and optionally `accept_lens`; any other file is
    JSON lines such as {"request_id": 3, "confidences": [0.9, 0.7], "accept_len": 1}, with or
    without `accept_len` throughout.

    Raises:
        ValueError: a field is missing or rows don't fit together.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as file:
                lens = file.get("accept_lens")
                return file["request_ids"], file["confidences"].astype(np.float32), lens
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        lens = [row["accept_len"] for row in rows] if "accept_len" in rows[0] else None
        return (
            np.array([row["request_id"] for row in rows]),
            np.array([row["confidences"] for row in rows], dtype=np.float32),
            None if lens is None else np.array(lens),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} isn't a record of confidences: {error!r}") from error


def _accept_lens(confidences: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    is_accepted = rng.random(confidences.shape) < confidences
    return np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
