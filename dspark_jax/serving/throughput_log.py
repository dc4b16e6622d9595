"""The periodic log line: what the server did since the last one."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np


class ThroughputLog:
    """Counts between two log lines. The engine adds steps, the HTTP layer adds tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.running = self.waiting = 0
        self.cache_usage = 0.0
        self._reset()

    def _reset(self) -> None:
        self._started_at = self._clock()
        self._prompt_tokens = self._generation_tokens = self._steps = self._drafts = 0
        self._accepted = np.zeros(0, np.int64)

    def add_tokens(self, *, prompt: int = 0, generation: int = 0) -> None:
        """Add processed prompt tokens and generated tokens."""
        self._prompt_tokens += prompt
        self._generation_tokens += generation

    def add_step(self) -> None:
        """Count one engine step."""
        self._steps += 1

    def add_drafts(self, num_drafts: int, accepted_per_position: np.ndarray) -> None:
        """Add verified proposals and their accepted drafts by position, int [any]."""
        self._drafts += num_drafts
        total = np.zeros(max(len(self._accepted), len(accepted_per_position)), np.int64)
        total[: len(self._accepted)] += self._accepted
        total[: len(accepted_per_position)] += accepted_per_position
        self._accepted = total

    def line(self) -> str | None:
        """Describe the time since the last call and start anew; None if the server was idle."""
        elapsed_s = max(self._clock() - self._started_at, 1e-9)
        is_idle = not (self._steps or self.running or self.waiting)
        text = (
            f"running {self.running}, waiting {self.waiting}, "
            f"cache {100 * self.cache_usage:.1f} %, "
            f"prompt {self._prompt_tokens / elapsed_s:.1f} tok/s, "
            f"generation {self._generation_tokens / elapsed_s:.1f} tok/s"
        )
        if self._drafts:
            mean = 1 + self._accepted.sum() / self._drafts
            rates = " ".join(f"{count / self._drafts:.2f}" for count in self._accepted)
            text += f", accepted length {mean:.2f} (by position {rates})"
        self._reset()
        return None if is_idle else text
