"""A step in flight, and what its outputs mean for the requests in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_jax.budget import NO_PROPOSAL
from dspark_jax.decode.plan import Logprobs, RowFinish, StepOutputs
from dspark_jax.serving.executor_protocol import PendingStep
from dspark_jax.serving.logprobs import token_logprobs
from dspark_jax.serving.metrics import StepReport
from dspark_jax.serving.policy import StepSize
from dspark_jax.serving.request import FinishReason, TokenChunk, TokenLogprob
from dspark_jax.serving.scheduler import Schedule, ScheduledRow
from dspark_jax.serving.sequence import Sequence, Status

_REASONS = {
    RowFinish.RUNNING: None,
    RowFinish.STOP: FinishReason.STOP,
    RowFinish.LENGTH: FinishReason.LENGTH,
    RowFinish.NON_FINITE: FinishReason.ERROR,
}
_NON_FINITE_ERROR = "the model's logits were not finite"


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A dispatched step. `number` rises by one from step to step and is the serial of what it drafts.

    `slots` (int [R]) are those of the rows at dispatch: a sequence may have lost its slot when the step lands.
    """

    number: int
    schedule: Schedule
    size: StepSize
    bucket: int
    slots: np.ndarray
    pending: PendingStep
    dispatched_at: float
    planning_s: float
    launch_s: float  # the part of it spent in `Executor.dispatch`

    def serials(self, outputs: StepOutputs) -> np.ndarray:
        """int [R], serial of the proposal each row made, `NO_PROPOSAL` where it made none."""
        has_drafted = (outputs.num_tokens > 0) & (outputs.finish == RowFinish.RUNNING)
        return np.where(has_drafted & self.size.drafts, self.number, NO_PROPOSAL)


def mark_dispatched(schedule: Schedule, size: StepSize, number: int) -> None:
    """Tell the sequences that their rows are in flight."""
    budget, serial = size.budget, number if size.drafts else NO_PROPOSAL
    for scheduled in schedule.rows:
        sequence, row = scheduled.sequence, scheduled.row
        if row.prompt_ids is not None:
            sequence.num_fed = row.start + scheduled.num_tokens
        if row.samples:
            scheduled.min_growth = 1
            scheduled.max_growth = 1 + min(row.draft_cap, budget) if budget else 1
            sequence.proposal_serial = serial
        sequence.on_dispatch(scheduled.min_growth, scheduled.max_growth)


@dataclass(frozen=True, slots=True)
class Landing:
    """Outcome of a step: what each request gets, and counts over the rows that could verify a proposal."""

    chunks: list[tuple[Sequence, TokenChunk]]
    verified_rows: np.ndarray  # int [N], their places in the step
    scheduled: np.ndarray  # int [N], drafts offered by those rows
    admitted: np.ndarray
    accepted: np.ndarray
    num_non_finite: int


def land(step: StepInFlight, outputs: StepOutputs) -> Landing:
    """Commit a step's tokens to its sequences and make the chunks that go out.

    A sequence that has ended or was aborted since the step was planned gets nothing more.
    """
    rows = step.schedule.rows
    verified, counts = _count_drafts(step, outputs)
    chunks: list[tuple[Sequence, TokenChunk]] = []
    num_non_finite, running = 0, int(RowFinish.RUNNING)
    prompt_row = 0  # first of the row's prompt log-probabilities
    columns = (outputs.tokens, outputs.num_tokens, outputs.finish)
    whole = zip(rows, *(column.tolist() for column in columns))
    for index, (scheduled, tokens, num_tokens, finish) in enumerate(whole):
        sequence, row = scheduled.sequence, scheduled.row
        token_ids = tokens[:num_tokens]
        if row.wants_prompt_logprobs:
            assert outputs.prompt_logprobs is not None
            _score_prompt(scheduled, outputs.prompt_logprobs, prompt_row)
            prompt_row += scheduled.num_tokens
        if sequence.status is Status.FINISHED:
            continue
        is_first = not sequence.output
        sequence.on_landing(scheduled.min_growth, scheduled.max_growth, token_ids)
        if finish == running and not is_first and not row.wants_logprobs:
            # Nearly every row of nearly every step.
            if token_ids:
                chunks.append((sequence, TokenChunk(tuple(token_ids))))
            continue
        reason = _REASONS[finish]
        num_non_finite += finish == RowFinish.NON_FINITE
        if token_ids or reason is not None:
            logprobs = _output_logprobs(sequence, outputs, index, token_ids)
            is_first = is_first and bool(token_ids)
            chunks.append((sequence, _chunk(sequence, token_ids, reason, logprobs, is_first)))
    return Landing(chunks, verified, *counts, num_non_finite=num_non_finite)


def report_step(
    step: StepInFlight,
    landing: Landing,
    confidences: np.ndarray,
    *,
    step_ms: float,
    host_s: float,
    host_cpu_s: float,
    is_drafter_skipped: bool,
) -> StepReport:
    """What the metrics are told of a landed step; see `StepReport` for the meanings."""
    return StepReport(
        bucket=step.bucket,
        budget=step.size.budget,
        step_ms=step_ms,
        host_s=host_s,
        launch_s=step.launch_s,
        host_cpu_s=host_cpu_s,
        scheduled=landing.scheduled,
        admitted=landing.admitted,
        accepted=landing.accepted,
        confidences=confidences,
        predicted_ms=step.size.predicted_ms,
        predicted_accepted=step.size.predicted_accepted,
        is_drafter_skipped=is_drafter_skipped,
        num_non_finite=landing.num_non_finite,
        num_sanitised=step.size.num_sanitised,
    )


def _count_drafts(step: StepInFlight, outputs: StepOutputs) -> tuple[np.ndarray, np.ndarray]:
    """Places int [N] of the rows that could verify a proposal; drafts scheduled, admitted, accepted, int64 [3, N].

    They are added to the statistics of the requests too.
    """
    if not step.schedule.num_draft_tokens:
        return np.zeros(0, np.intp), np.zeros((3, 0), np.int64)
    rows = step.schedule.rows
    verified = [
        index
        for index, scheduled in enumerate(rows)
        if scheduled.row.draft_cap and scheduled.sequence.status is not Status.FINISHED
    ]
    counts = np.zeros((3, len(verified)), np.int64)
    counts[0] = [rows[index].row.draft_cap for index in verified]
    counts[1] = outputs.verify_lens[verified]
    # The last token is the target's own; where a stop id cut the row short it may have been a draft.
    np.clip(outputs.num_tokens[verified] - 1, 0, counts[1], out=counts[2])
    for index, scheduled, admitted, accepted in zip(verified, *counts.tolist()):
        stats = rows[index].sequence.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += scheduled
        stats.num_admitted_tokens += admitted
        stats.num_accepted_tokens += accepted
    return np.array(verified, np.intp), counts


def _chunk(
    sequence: Sequence,
    token_ids: list[int],
    reason: FinishReason | None,
    logprobs: tuple[TokenLogprob, ...] | None,
    is_first: bool,
) -> TokenChunk:
    prompt_logprobs = num_cached_tokens = None
    if is_first:
        num_cached_tokens = sequence.num_cached_tokens
        if sequence.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
    return TokenChunk(
        tuple(token_ids),
        finish_reason=reason,
        stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
        error=_NON_FINITE_ERROR if reason is FinishReason.ERROR else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=num_cached_tokens,
        speculation=None if reason is None else sequence.stats,
    )


def _output_logprobs(
    sequence: Sequence, outputs: StepOutputs, index: int, token_ids: list[int]
) -> tuple[TokenLogprob, ...] | None:
    num_top = sequence.request.sampling.logprobs
    if num_top is None:
        return None
    assert outputs.logprobs is not None
    first_row = index * outputs.tokens.shape[1]
    return token_logprobs(outputs.logprobs, first_row, token_ids, num_top)


def _score_prompt(scheduled: ScheduledRow, logprobs: Logprobs, first_row: int) -> None:
    """Keep the log-probabilities of the prompt tokens that follow those the row fed."""
    sequence = scheduled.sequence
    scores = sequence.prompt_logprobs
    num_top = sequence.request.sampling.prompt_logprobs
    assert scores is not None
    assert num_top is not None
    assert scheduled.row.prompt_ids is not None
    followers = scheduled.row.prompt_ids[1:].tolist()
    start = scheduled.row.start + 1
    scores[start : start + len(followers)] = token_logprobs(logprobs, first_row, followers, num_top)
