"""How many drafts each step verifies, and whether it drafts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark_jax.budget import (
    AcceptanceCorrection,
    BudgetDecision,
    BudgetLimits,
    BudgetPolicy,
    ConfidenceSnapshots,
    CostTable,
    DraftMode,
    DraftSkipper,
    choose_budget,
)
from dspark_jax.budget.cost_table import SWITCH_OFF
from dspark_jax.serving.scheduler import Schedule
from dspark_jax.serving.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class StepSize:
    """Answer of a policy: drafts to verify over all rows, whether to draft afterwards, and what it expects.

    The first `min_depth` drafts of every row are part of the budget before any other.
    """

    budget: int
    drafts: bool
    predicted_ms: float | None = None
    predicted_accepted: float | None = None
    min_depth: int = 0
    num_sanitised: int = 0  # confidences that were no probabilities
    acceptance_ratio: float = 1.0  # factor within `predicted_accepted`
    context_len: float = 0.0  # cached positions per request that the prediction assumed


class VerificationPolicy(Protocol):
    """Sizes the steps. It may know confidences of earlier proposals only, never of the one about to be verified.

    Otherwise whether a draft is verified would depend on the draft itself, and the output would no longer
    follow the target's distribution (DSpark paper, section 5.2).
    """

    @property
    def draft_cap(self) -> int:
        """Drafts of a proposal that a request offers for verification."""
        ...

    @property
    def min_depth(self) -> int:
        """Drafts of these that every budget holds, 0..draft_cap; prompts go before most of the others."""
        ...

    def size(self, schedule: Schedule) -> StepSize:
        """Budget of a step, 0..schedule.max_budget. Called once per step, in order."""
        ...

    def on_admit(self, slot: int, first_serial: int) -> None:
        """A new tenant has the slot; its proposals have serials from `first_serial`."""
        ...

    def on_landing(self, slots: np.ndarray, serials: np.ndarray, confidences: np.ndarray) -> None:
        """A step has landed: confidences float32 [N, G] of the proposals `serials` int [N] in `slots` int [N]."""
        ...

    def on_verdicts(
        self, schedule: Schedule, size: StepSize, admitted: np.ndarray, accepted: np.ndarray
    ) -> None:
        """What came of N proposals in a landed step, drafts admitted and accepted, int [N].

        Requests that had ended meanwhile are not among them.
        """
        ...

    def on_step_time(self, schedule: Schedule, size: StepSize, measured_ms: float) -> None:
        """How long the device took for a step that this policy sized."""
        ...


class _WithoutHistory:
    """The callbacks of policies that learn nothing."""

    def on_admit(self, slot: int, first_serial: int) -> None:
        pass

    def on_landing(self, slots: np.ndarray, serials: np.ndarray, confidences: np.ndarray) -> None:
        pass

    def on_verdicts(
        self, schedule: Schedule, size: StepSize, admitted: np.ndarray, accepted: np.ndarray
    ) -> None:
        pass

    def on_step_time(self, schedule: Schedule, size: StepSize, measured_ms: float) -> None:
        pass


class PlainDecoding(_WithoutHistory):
    """One token per request and step; the drafter never runs."""

    draft_cap = 0
    min_depth = 0

    def size(self, schedule: Schedule) -> StepSize:
        return StepSize(0, drafts=False)


class FixedVerification(_WithoutHistory):
    """Verifies the first `draft_cap` drafts of every proposal."""

    def __init__(self, draft_cap: int) -> None:
        self.draft_cap = self.min_depth = draft_cap

    def size(self, schedule: Schedule) -> StepSize:
        return StepSize(schedule.max_budget, drafts=True)


class AdaptiveVerification:
    """The budget with the most expected tokens per second, and no drafter where ordinary decoding is faster."""

    def __init__(
        self,
        *,
        num_slots: int,
        draft_len: int,
        cost: CostTable,
        objective: BudgetPolicy,
        skipper: DraftSkipper | None,
        smoothing: float | None = None,
        acceptance: AcceptanceCorrection | None = None,
    ) -> None:
        """
        Args:
            num_slots: request slots.
            draft_len: tokens per proposal.
            cost: step times.
            objective: what to optimise.
            skipper: decides when the drafter rests; None for a drafter that always runs.
            smoothing: see `ConfidenceSnapshots`.
            acceptance: corrects confidences by verdicts; None takes them as they are.
        """
        self.draft_cap = draft_len
        self.min_depth = objective.min_depth
        self._cost = cost
        self._objective = objective
        self._skipper = skipper
        self._acceptance = acceptance
        self._snapshots = ConfidenceSnapshots(num_slots, draft_len, smoothing=smoothing)

    def size(self, schedule: Schedule) -> StepSize:
        rows, num_rows = schedule.rows, len(schedule.rows)
        context_len = sum(r.sequence.min_len for r in rows) / num_rows
        skipper = self._skipper
        if skipper is not None and skipper.mode is DraftMode.SKIP and not schedule.num_draft_tokens:
            # Most steps of a load at which drafts don't pay: there is nothing to choose from.
            drafts = skipper.rest(sum(r.row.samples for r in rows)) is DraftMode.PROBE
            return self._without_decision(schedule, 0, drafts, context_len)
        slots = np.array([r.sequence.slot for r in rows])
        pending_serials = np.array([r.sequence.proposal_serial for r in rows])
        ratio = 1.0 if self._acceptance is None else self._acceptance.ratio
        draft_caps = np.array([r.row.draft_cap for r in rows])
        decision = choose_budget(
            self._snapshots.read(slots, pending_serials),
            draft_caps,
            np.array([r.num_tokens for r in rows]),
            np.array([r.row.samples for r in rows]),
            self._cost,
            context_len,
            BudgetLimits(max_logit_rows=num_rows + schedule.max_budget),
            self._objective,
            acceptance_ratio=ratio,
        )
        mode = DraftMode.DRAFT
        if skipper is not None:
            is_believed = self._snapshots.is_believed(slots, pending_serials)
            mode = skipper.update(without_belief(decision, draft_caps, is_believed, ratio))
        if mode is DraftMode.DRAFT:
            return StepSize(
                decision.budget,
                drafts=True,
                predicted_ms=decision.predicted_ms,
                predicted_accepted=decision.predicted_tokens - decision.num_sampling,
                min_depth=self.min_depth,
                num_sanitised=decision.num_sanitised,
                context_len=context_len,
                acceptance_ratio=ratio,
            )
        # A step that skips the drafter still verifies what the step before it drafted.
        budget = 0 if mode is DraftMode.PROBE else decision.budget
        drafts = mode is DraftMode.PROBE
        return self._without_decision(
            schedule, budget, drafts, context_len, num_sanitised=decision.num_sanitised
        )

    def _without_decision(
        self,
        schedule: Schedule,
        budget: int,
        drafts: bool,
        context_len: float,
        *,
        num_sanitised: int = 0,
    ) -> StepSize:
        """A step whose size the skipper has settled; nothing is predicted but its time."""
        predicted_ms = self._cost.step_ms(
            schedule.num_tokens + budget,
            len(schedule.rows),
            draft=drafts,
            context_len=context_len,
        )
        return StepSize(
            budget,
            drafts=drafts,
            predicted_ms=predicted_ms,
            min_depth=self.min_depth,
            num_sanitised=num_sanitised,
            context_len=context_len,
        )

    def on_admit(self, slot: int, first_serial: int) -> None:
        self._snapshots.admit(slot, first_serial)

    def on_landing(self, slots: np.ndarray, serials: np.ndarray, confidences: np.ndarray) -> None:
        self._snapshots.record(slots, serials, confidences)

    def on_verdicts(
        self, schedule: Schedule, size: StepSize, admitted: np.ndarray, accepted: np.ndarray
    ) -> None:
        if self._acceptance is None or not size.predicted_accepted:
            return
        num_offered = sum(row.row.draft_cap > 0 for row in schedule.rows)
        promised = size.predicted_accepted / size.acceptance_ratio * len(admitted) / num_offered
        num_proposals = int(np.count_nonzero(admitted))
        self._acceptance.observe(promised, float(accepted.sum()), num_proposals)

    def on_step_time(self, schedule: Schedule, size: StepSize, measured_ms: float) -> None:
        self._cost.observe(
            schedule.num_tokens + size.budget,
            len(schedule.rows),
            draft=size.drafts,
            context_len=size.context_len,
            measured_ms=measured_ms,
        )


def without_belief(
    decision: BudgetDecision, draft_caps: np.ndarray, is_believed: np.ndarray, ratio: float
) -> BudgetDecision:
    """The decision as if requests without history did as the others do, for whoever asks whether drafts pay.

    For its size they count as certain, which is one step's matter. In a stream of short answers there is always
    some such request, and drafting would seem to pay where it does not. Where no request has a history the
    decision tells nothing: it is given as one to which no drafts were offered.

    Args:
        decision: as `choose_budget` took it.
        draft_caps: int [R], drafts offered by each request.
        is_believed: bool [R], requests without history; their drafts come first in every budget.
        ratio: the acceptance ratio of the decision.
    """
    num_offering = int(np.count_nonzero(draft_caps))
    num_known = int(np.count_nonzero(draft_caps[~is_believed]))
    if num_known == num_offering:
        return decision
    if not num_known:
        return dataclasses.replace(decision, num_draft_tokens=0)
    believed = min(decision.budget, int(draft_caps[is_believed].sum())) * min(ratio, 1.0)
    known = decision.predicted_tokens - decision.num_sampling - believed
    tokens = decision.num_sampling + max(known, 0.0) * num_offering / num_known
    return dataclasses.replace(decision, predicted_tokens=tokens)


def policy_from_config(
    config: SpeculativeConfig | None, *, num_slots: int, draft_len: int, cost: CostTable | None
) -> VerificationPolicy:
    """The policy that `--speculative-config` asks for.

    Raises ValueError for drafting without a drafter, or for adaptive verification without step times.
    """
    if config is None:
        return PlainDecoding()
    if draft_len == 0:
        raise ValueError("the executor has no drafter; leave --speculative-config out")
    if config.mode == "fixed":
        verify_len = config.fixed_verify_len
        return FixedVerification(draft_len if verify_len is None else verify_len)
    if cost is None:
        raise ValueError(f"adaptive verification needs measured step times: {SWITCH_OFF}")
    return AdaptiveVerification(
        num_slots=num_slots,
        draft_len=draft_len,
        cost=cost,
        objective=BudgetPolicy(
            hysteresis=config.hysteresis,
            min_depth=config.min_depth,
            target_token_ms=config.target_token_ms,
            prompt_cost=config.prompt_cost,
        ),
        skipper=DraftSkipper() if config.enable_drafter_skipping else None,
        smoothing=config.confidence_smoothing,
        acceptance=AcceptanceCorrection() if config.enable_acceptance_correction else None,
    )
