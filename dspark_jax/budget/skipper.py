"""When to stop running the drafter, and when to look again."""

import enum

from dspark_jax.budget.optimizer import BudgetDecision


class DraftMode(enum.Enum):
    """What a step does about drafts."""

    DRAFT = "draft"  # verify the chosen budget, then draft
    PROBE = "probe"  # verify nothing, but draft, to learn fresh confidences
    SKIP = "skip"  # no drafter in this step


_LARGEST_GAIN = 0.2  # of one decision, either way
_PROBE_WEIGHT = 0.25


class DraftSkipper:
    """Turns the drafter off while ordinary decoding is predicted to be faster than any budget.

    Even a budget of 0 pays for the drafter. Every step with drafts tells by how much the chosen
    budget beats ordinary decoding, or loses; once the running mean of that is a loss, the drafter
    stops. A mean and not a run of losses: near the break-even every second step may win while all
    of them together lose. It is tried again every `probe_interval` steps, the interval doubling
    after each attempt in vain, and at once when the load has halved. An attempt drafts for
    `probe_len` steps without verifying anything, because until the first confidences are back on
    the host every draft would have to be believed; then one ordinary decision joins the mean and
    settles whether to go on.
    """

    def __init__(
        self,
        *,
        memory: int = 16,
        margin: float = 0.02,
        probe_interval: int = 64,
        max_probe_interval: int = 512,
        probe_len: int = 2,
    ) -> None:
        """
        Args:
            memory: decisions that the running mean remembers.
            margin: mean fraction by which the budgets must lose before the drafter stops.
            probe_interval: steps without the drafter before the first probe.
            max_probe_interval: bound of the doubling.
            probe_len: steps until confidences of a probe are on the host: 2 with two steps in
                flight.
        """
        if min(memory, probe_interval, probe_len) < 1 or max_probe_interval < probe_interval:
            raise ValueError(
                "memory, probe_interval and probe_len must be at least 1 and max_probe_interval "
                f"at least probe_interval, got {memory}, {probe_interval}, {probe_len}, "
                f"{max_probe_interval}"
            )
        if margin < 0.0:
            raise ValueError(f"margin must be >= 0, got {margin}")
        self.memory = memory
        self.margin = margin
        self.probe_interval = probe_interval
        self.max_probe_interval = max_probe_interval
        self.probe_len = probe_len
        self.mode = DraftMode.DRAFT
        self.num_skipped = 0
        self._gain = 0.0
        self._interval = probe_interval
        self._remaining = 0
        self._stopped_at_load = 0

    def update(self, decision: BudgetDecision) -> DraftMode:
        """Mode of the step the decision was made for; call it once for every step.

        In `PROBE` the caller replaces the budget by 0, in `SKIP` it runs the executable without the
        drafter.
        """
        if self.mode is DraftMode.SKIP:
            return self.rest(decision.num_sampling)
        if self.mode is DraftMode.PROBE and self._remaining > 0:
            self._remaining -= 1
        elif decision.num_draft_tokens:
            self._judge(decision)
        if self.mode is DraftMode.SKIP:
            self.num_skipped += 1
        return self.mode

    def rest(self, num_sampling: int) -> DraftMode:
        """`update` for a step in `SKIP`, where nothing is decided but when to probe.

        Args:
            num_sampling: requests that emit a token in the step.
        """
        self._remaining -= 1
        has_halved = 0 < 2 * num_sampling <= self._stopped_at_load
        if has_halved:
            # What was learned under twice the load says little about this one.
            self._gain = 0.0
        if self._remaining <= 0 or has_halved:
            self.mode = DraftMode.PROBE
            self._remaining = self.probe_len - 1
        else:
            self.num_skipped += 1
        return self.mode

    def _judge(self, decision: BudgetDecision) -> None:
        plain = decision.plain_tokens_per_ms
        gain = (decision.tokens_per_ms - plain) / plain if plain else 0.0
        # Requests without history count as certain, which predicts a gain of several times.
        gain = min(max(gain, -_LARGEST_GAIN), _LARGEST_GAIN)
        is_probe = self.mode is DraftMode.PROBE
        # A probe has few decisions to speak through.
        weight = max(_PROBE_WEIGHT, 1 / self.memory) if is_probe else 1 / self.memory
        self._gain += weight * (gain - self._gain)
        if is_probe and self._gain >= 0.0:
            self._interval = self.probe_interval
            self.mode = DraftMode.DRAFT
        elif is_probe:
            self._interval = min(2 * self._interval, self.max_probe_interval)
            self._stop(decision)
        elif self._gain < -self.margin:
            self._stop(decision)

    def _stop(self, decision: BudgetDecision) -> None:
        self.mode = DraftMode.SKIP
        self._remaining = self._interval
        self._stopped_at_load = decision.num_sampling
