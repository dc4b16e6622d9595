"""A closed loop of requests decoded under one policy, with a trace for the drafter and a table for
the clock."""

from dataclasses import dataclass

import numpy as np

from dspark_jax.budget.allocate_reference import allocate
from dspark_jax.budget.cost_table import CostTable
from dspark_jax.budget.optimizer import BudgetLimits, BudgetPolicy, choose_budget
from dspark_jax.budget.skipper import DraftMode, DraftSkipper
from dspark_jax.budget.snapshots import NO_PROPOSAL, ConfidenceSnapshots
from dspark_jax.budget.step_room import reserved_for_drafts, room_for_drafts
from dspark_jax.budget.traces import Trace


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is compared: a policy, and the drafts offered per request (None: the drafter's whole
    proposal)."""

    name: str
    policy: BudgetPolicy
    draft_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that follow each other in `concurrency` slots. Lengths in tokens.

    The first `num_warm_up` steps aren't counted.
    """

    concurrency: int
    prompt_len: int = 256
    output_len: int = 512
    num_steps: int = 400
    num_warm_up: int = 20

    def __post_init__(self) -> None:
        if min(self.concurrency, self.prompt_len, self.output_len, self.num_steps) < 1:
            raise ValueError(f"lengths and counts of a load must be at least 1, got {self}")
        if self.num_warm_up < 0:
            raise ValueError(f"num_warm_up must be >= 0, got {self.num_warm_up}")


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """Outcome of one arm at one concurrency.

    Attributes:
        arm: its name.
        concurrency: slots.
        tokens_per_s: output tokens of all requests.
        token_ms: mean time per output token of one request.
        accepted_len: tokens per decoding request and step, the bonus token included.
        budget: mean drafts verified per step.
        step_tokens: mean tokens per step, prompts included.
        step_ms: mean time of a step.
        skipped: share of steps without the drafter.
    """

    arm: str
    concurrency: int
    tokens_per_s: float
    token_ms: float
    accepted_len: float
    budget: float
    step_tokens: float
    step_ms: float
    skipped: float


def replay(
    arm: Arm,
    load: Load,
    trace: Trace,
    cost: CostTable,
    context_len: float,
    limits: BudgetLimits,
    rng: np.random.Generator,
) -> ArmResult:
    """Plays `load` under `arm`; the step times are those of `cost`, which the policy also sees.

    A request spends one step on its prompt, then decodes. Prompts that would overfill a step wait.
    `rng` only staggers the requests that are under way at the beginning.
    """
    slots = np.arange(load.concurrency)
    snapshots = ConfidenceSnapshots(load.concurrency, trace.draft_len)
    skipper = DraftSkipper()
    offered_len = trace.draft_len if arm.draft_len is None else arm.draft_len
    remaining = rng.integers(1, load.output_len + 1, size=load.concurrency)
    is_prompt = np.zeros(load.concurrency, dtype=bool)
    # A request proposes for the first time in the step that finishes its prompt.
    serials = np.full(load.concurrency, NO_PROPOSAL, dtype=np.int64)
    confidences = np.zeros((load.concurrency, trace.draft_len), dtype=np.float32)
    accept_lens = np.zeros(load.concurrency, dtype=np.int64)
    totals = dict.fromkeys(("tokens", "ms", "decoded", "decodes", "budget", "rows", "skipped"), 0.0)

    for step in range(load.num_warm_up + load.num_steps):
        has_draft = (serials != NO_PROPOSAL) & ~is_prompt
        # Nothing is drafted beyond the end of a request.
        draft_lens = np.where(has_draft, np.minimum(offered_len, remaining - 1), 0)
        if arm.policy.mode == "none":
            draft_lens[:] = 0
        draft_lens, is_admitted = _place(
            draft_lens,
            is_prompt,
            load.prompt_len,
            cost.max_tokens,
            arm.policy.min_depth if arm.policy.mode == "adaptive" else None,
        )
        query_lens = np.where(is_admitted, load.prompt_len, np.where(is_prompt, 0, 1))
        is_sampling = query_lens > 0
        draft_room = cost.max_tokens - int(query_lens.sum())
        logit_rows = int(np.count_nonzero(is_sampling)) + draft_room

        decision = choose_budget(
            snapshots.read(slots, serials),
            draft_lens,
            query_lens,
            is_sampling,
            cost,
            context_len,
            BudgetLimits(max_logit_rows=min(limits.max_logit_rows, logit_rows)),
            arm.policy,
        )
        mode = skipper.update(decision) if arm.policy.mode == "adaptive" else DraftMode.DRAFT
        budget = 0 if mode is DraftMode.PROBE else decision.budget
        is_drafting = arm.policy.mode != "none" and mode is not DraftMode.SKIP
        num_tokens = decision.num_query_tokens + budget
        verify_lens = allocate(confidences, draft_lens, budget, min_depth=arm.policy.min_depth)
        emitted = np.where(is_sampling, np.minimum(accept_lens, verify_lens) + 1, 0)

        if step >= load.num_warm_up:
            is_decode = is_sampling & ~is_prompt
            totals["tokens"] += emitted.sum()
            totals["decoded"] += emitted[is_decode].sum()
            totals["decodes"] += np.count_nonzero(is_decode)
            totals["budget"] += budget
            totals["rows"] += num_tokens
            totals["skipped"] += not is_drafting
            totals["ms"] += cost.step_ms(
                num_tokens,
                int(np.count_nonzero(is_sampling)),
                draft=is_drafting,
                context_len=context_len,
            )

        remaining -= emitted
        is_finished = remaining <= 0
        is_prompt = (is_prompt & ~is_admitted) | is_finished
        serials[:] = NO_PROPOSAL
        if is_drafting:
            drafting = slots[is_sampling & ~is_finished]
            confidences[drafting], accept_lens[drafting] = trace.propose(drafting)
            serials[drafting] = step
            snapshots.record(drafting, serials[drafting], confidences[drafting])
        finished = slots[is_finished]
        remaining[finished] = load.output_len
        trace.restart(finished)
        for slot in finished:
            snapshots.admit(slot, first_serial=step + 1)

    return ArmResult(
        arm=arm.name,
        concurrency=load.concurrency,
        tokens_per_s=1e3 * totals["tokens"] / totals["ms"],
        token_ms=load.concurrency * totals["ms"] / totals["tokens"],
        accepted_len=totals["decoded"] / max(totals["decodes"], 1.0),
        budget=totals["budget"] / load.num_steps,
        step_tokens=totals["rows"] / load.num_steps,
        step_ms=totals["ms"] / load.num_steps,
        skipped=totals["skipped"] / load.num_steps,
    )


def _place(
    draft_lens: np.ndarray,
    is_prompt: np.ndarray,
    prompt_len: int,
    max_tokens: int,
    min_depth: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that each request offers, int[R], and the prompts that the step holds, bool[R].

    `min_depth` drafts of each must be verified, all if it is None.
    """
    num_decodes = int(np.count_nonzero(~is_prompt))
    room = room_for_drafts(num_decodes, max_tokens, has_prompts=bool(is_prompt.any()))
    num_reserved = int(draft_lens.sum())
    if min_depth is not None:
        num_floor = int(np.minimum(draft_lens, min_depth).sum())
        num_reserved = reserved_for_drafts(num_reserved, num_floor, room, max_tokens)
    elif num_reserved > room:
        level = room // np.count_nonzero(draft_lens)
        draft_lens = np.minimum(draft_lens, level)
        num_reserved = int(draft_lens.sum())
    prompt_room = max_tokens - num_decodes - num_reserved
    return draft_lens, is_prompt & (np.cumsum(is_prompt) <= prompt_room // prompt_len)
