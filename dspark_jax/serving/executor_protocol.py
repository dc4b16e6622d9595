"""What the engine needs of whatever runs its steps: the real executor, or a fake one in tests."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dspark_jax.budget import CostTable
from dspark_jax.decode.plan import StepOutputs, StepPlan


class PendingStep(Protocol):
    """A step that has been dispatched."""

    def is_ready(self) -> bool:
        """True once `fetch` would not wait."""
        ...

    def fetch(self) -> StepOutputs:
        """Wait until the step has landed and return its outputs. Raises whatever the step raised."""
        ...


class Executor(Protocol):
    """Owner of the device state. Steps run in the order of dispatch, each on the state the last one left.

    The engine relies on that order: a slot or a page given up by one request may be given to another in the
    next dispatched step, even while a step that still writes to it is in flight. Copies of rings keep to it too.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def draft_len(self) -> int:
        """Tokens per proposal, 0 without a drafter."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """Compiled token counts, increasing."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int:
        """Source positions per page."""
        ...

    @property
    def num_snapshots(self) -> int:
        """Places for copies of a slot's rings, 0 without prefix caching."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output; the page table has a column for each page of it."""
        ...

    @property
    def cost_table(self) -> CostTable | None:
        """Step times measured by `warm_up`; None if the configuration has no use for them."""
        ...

    def max_logit_rows(self, bucket: int) -> int:
        """Rows of logits that a step of this bucket may produce; non-decreasing over the buckets."""
        ...

    def warm_up(self) -> None:
        """Compile every bucket and measure what is to be measured. Called once, before the first step."""
        ...

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Start a step and return at once."""
        ...

    def save_snapshot(self, slot: int, place: int) -> None:
        """Copy the rings of a slot, as the last dispatched step leaves them, to a place; returns at once."""
        ...

    def restore_snapshot(self, slot: int, place: int) -> None:
        """Let the next step find in a slot the rings that were saved at a place; returns at once."""
        ...

    def set_counts(self, slot: int, output: np.ndarray, prompt: np.ndarray) -> None:
        """Let the next step find in a slot what penalties look at, see `TokenCounts`: int32 [V] and bool [V]."""
        ...
