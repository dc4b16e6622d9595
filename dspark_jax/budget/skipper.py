"""When to stop running the drafter, and when to look again."""

import enum
import math
from dataclasses import dataclass

from dspark_jax.budget.optimizer import BudgetDecision


class DraftMode(enum.Enum):
    """What a step does about drafts."""

    DRAFT = "draft"  # verify the chosen budget, then draft
    PROBE = "probe"  # verify nothing, but draft, to learn fresh confidences
    SKIP = "skip"  # no drafter in this step


# Of one decision for one request, either way; of n requests, whose chances even out, the root of n less. Wide
# enough for one, whose decisions scatter by half a step's time: cut to less, the many that lose a little outweigh
# the few that gain much.
_LARGEST_GAIN = 1.0
_PROBE_WEIGHT = 0.25
# A decision for fewer requests tells less by as much: of one request, drafts pay in some passages and not in
# others, and a rest outlasts the passage.
_FEW_REQUESTS = 4
# What drafts are thought to gain before any decision: else the first two bad ones of a new load would end it.
_FIRST_GAIN = 0.1


@dataclass
class _Load:
    """What is known of one class of loads: those of the same power of two."""

    interval: int  # steps from a vain attempt to the next
    gain: float = _FIRST_GAIN  # running mean
    is_resting: bool = False
    remaining: int = 0  # steps until the next attempt, while resting


class DraftSkipper:
    """Turns the drafter off while ordinary decoding is predicted to be faster than any budget.

    Even a budget of 0 pays for the drafter. Every step with drafts tells how much time the chosen
    budget saves against ordinary decoding, or costs; once the running mean of that is a loss, the
    drafter stops. A mean and not a run of losses: near the break-even every second step may win while all
    of them together lose. It is tried again every `probe_interval` steps, the interval doubling
    after each attempt in vain. An attempt drafts for `probe_len` steps without verifying anything,
    because until the first confidences are back on the host every draft would have to be believed;
    then one ordinary decision joins the mean and settles whether to go on. A drafter that takes as
    long as the rest of the step thus costs less than 3 % where it never pays.

    All this is known for each class of loads apart, a class being the requests of the same power of
    two: what a full batch has taught says little about a few requests, and the batch that shrinks
    for a moment whenever a request ends should not learn the same again each time. A class that is
    new takes over what the class before it knew; if there the drafter rested under a higher load,
    an attempt is made at once.
    """

    def __init__(
        self,
        *,
        memory: int = 16,
        margin: float = 0.02,
        probe_interval: int = 128,
        max_probe_interval: int = 1024,
        probe_len: int = 2,
    ) -> None:
        """
        Args:
            memory: decisions that the running mean remembers; of less than four requests, more.
            margin: mean loss, as a share of an ordinary step's time, at which the drafter stops.
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
        self._remaining = 0  # steps of the attempt under way whose confidences aren't believed
        self._class = 0
        self._load = _Load(probe_interval)
        self._loads: dict[int, _Load] = {}

    def update(self, decision: BudgetDecision) -> DraftMode:
        """Mode of the step the decision was made for; call it once for every step.

        In `PROBE` the caller replaces the budget by 0, in `SKIP` it runs the executable without the
        drafter.
        """
        self._enter(decision.num_sampling)
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

        Under a load at which the drafter is known to pay, the attempt is made at once too.

        Args:
            num_sampling: requests that emit a token in the step.
        """
        self._enter(num_sampling)
        load = self._load
        load.remaining -= 1
        if load.remaining <= 0 or not load.is_resting:
            self.mode = DraftMode.PROBE
            self._remaining = self.probe_len - 1
        else:
            self.mode = DraftMode.SKIP
            self.num_skipped += 1
        return self.mode

    def _enter(self, num_sampling: int) -> None:
        """Go by what is known of this load; a step that samples nothing belongs to the load before it."""
        new = num_sampling.bit_length()
        if not num_sampling or new == self._class:
            return
        before, is_less = self._load, new < self._class
        if new not in self._loads:
            self._loads[new] = _Load(
                self.probe_interval if is_less else before.interval,
                0.0 if is_less and before.is_resting else before.gain,
                before.is_resting,
                0 if is_less else before.remaining,
            )
        self._class, self._load = new, self._loads[new]
        if self.mode is DraftMode.DRAFT and self._load.is_resting:
            self.mode = DraftMode.SKIP

    def _judge(self, decision: BudgetDecision) -> None:
        largest = _LARGEST_GAIN / math.sqrt(decision.num_sampling)
        gain = min(max(decision.gain, -largest), largest)
        is_probe = self.mode is DraftMode.PROBE
        # A probe has few decisions to speak through.
        weight = min(1.0, decision.num_sampling / _FEW_REQUESTS) / self.memory
        if is_probe:
            weight = max(_PROBE_WEIGHT, weight)
        load = self._load
        load.gain += weight * (gain - load.gain)
        if is_probe and load.gain >= 0.0:
            load.interval = self.probe_interval
            load.is_resting = False
            self.mode = DraftMode.DRAFT
        elif is_probe:
            load.interval = min(2 * load.interval, self.max_probe_interval)
            self._stop()
        elif load.gain < -self.margin:
            self._stop()

    def _stop(self) -> None:
        self.mode = DraftMode.SKIP
        self._load.is_resting = True
        self._load.remaining = self._load.interval
