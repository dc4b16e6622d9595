"""When to stop running the drafter, and when to look again."""

import enum

from dspark_jax.budget.optimizer import BudgetDecision


class DraftMode(enum.Enum):
    """What a step does about drafts."""

    DRAFT = "draft"  # verify the chosen budget, then draft
    PROBE = "probe"  # verify nothing, but draft, to learn fresh confidences
    SKIP = "skip"  # no drafter in this step


class DraftSkipper:
    """Turns the drafter off while ordinary decoding is predicted to be faster than any budget.

    Even a budget of 0 pays for the drafter. After `patience` steps in a row for which that is
    predicted to be slower than not drafting at all, the drafter stops. It is tried again every
    `probe_interval` steps, the interval doubling after each attempt in vain, and at once when the
    load has halved. An attempt drafts for `probe_len` steps without verifying anything, because
    until the first confidences are back on the host every draft would have to be believed; then one
    ordinary decision settles whether to go on.
    """

    def __init__(
        self,
        *,
        patience: int = 8,
        margin: float = 0.02,
        probe_interval: int = 64,
        max_probe_interval: int = 512,
        probe_len: int = 2,
    ) -> None:
        """
        Args:
            patience: consecutive losing steps before the drafter stops.
            margin: fraction by which ordinary decoding must be faster for a step to count as
                losing.
            probe_interval: steps without the drafter before the first probe.
            max_probe_interval: bound of the doubling.
            probe_len: steps until confidences of a probe are on the host: 2 with two steps in
                flight.
        """
        if min(patience, probe_interval, probe_len) < 1 or max_probe_interval < probe_interval:
            raise ValueError(
                "patience, probe_interval and probe_len must be at least 1 and max_probe_interval "
                f"at least probe_interval, got {patience}, {probe_interval}, {probe_len}, "
                f"{max_probe_interval}"
            )
        if margin < 0.0:
            raise ValueError(f"margin must be >= 0, got {margin}")
        self.patience = patience
        self.margin = margin
        self.probe_interval = probe_interval
        self.max_probe_interval = max_probe_interval
        self.probe_len = probe_len
        self.mode = DraftMode.DRAFT
        self.num_skipped = 0
        self._num_losing = 0
        self._interval = probe_interval
        self._remaining = 0
        self._stopped_at_tokens = 0

    def update(self, decision: BudgetDecision) -> DraftMode:
        """Mode of the step the decision was made for; call it once for every step.

        In `PROBE` the caller replaces the budget by 0, in `SKIP` it runs the executable without the
        drafter.
        """
        if self.mode is DraftMode.SKIP:
            self._remaining -= 1
            if self._remaining <= 0 or 2 * decision.num_query_tokens <= self._stopped_at_tokens:
                self.mode = DraftMode.PROBE
                self._remaining = self.probe_len - 1
        elif self.mode is DraftMode.PROBE and self._remaining > 0:
            self._remaining -= 1
        elif decision.num_draft_tokens:
            self._judge(decision)
        if self.mode is DraftMode.SKIP:
            self.num_skipped += 1
        return self.mode

    def _judge(self, decision: BudgetDecision) -> None:
        is_losing = decision.plain_tokens_per_ms > (1.0 + self.margin) * decision.tokens_per_ms
        if self.mode is DraftMode.PROBE:
            if is_losing:
                self._interval = min(2 * self._interval, self.max_probe_interval)
                self._stop(decision)
            else:
                self._interval = self.probe_interval
                self._num_losing = 0
                self.mode = DraftMode.DRAFT
            return
        self._num_losing = self._num_losing + 1 if is_losing else 0
        if self._num_losing >= self.patience:
            self._stop(decision)

    def _stop(self, decision: BudgetDecision) -> None:
        self.mode = DraftMode.SKIP
        self._num_losing = 0
        self._remaining = self._interval
        self._stopped_at_tokens = decision.num_query_tokens
