"""What policies decide, and from which proposals' confidences."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from dspark_jax.budget import (
    NO_PROPOSAL,
    BudgetLimits,
    BudgetPolicy,
    CostCurves,
    CostTable,
    DraftSkipper,
    choose_budget,
)
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.policy import (
    AdaptiveVerification,
    FixedVerification,
    PlainDecoding,
    StepSize,
    policy_from_config,
    without_belief,
)
from dspark_jax.serving.scheduler import Schedule, ScheduledRow
from dspark_jax.serving.speculative_config import SpeculativeConfig, parse_speculative_config
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.harness import check_ordinary, collect, make_request, sample, serving
from tests.serving.engine.test_scheduler import make_sequence

DRAFT_LEN = 3
NUM_SLOTS = 4


def flat_cost(*, verify_ms: float = 1.0, draft_ms: float = 0.0) -> CostTable:
    """Every step costs the same, so that every draft with a chance is worth verifying."""
    curves = CostCurves(context_len=16, verify={32: verify_ms}, draft={NUM_SLOTS: draft_ms})
    return CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS)


def steep_cost(free_tokens: int) -> CostTable:
    """Tokens beyond `free_tokens` are far too dear."""
    curves = CostCurves(
        context_len=16, verify={free_tokens: 1.0, 32: 1000.0}, draft={NUM_SLOTS: 0.0}
    )
    return CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS)


def adaptive(cost: CostTable, skipper: DraftSkipper | None = None) -> AdaptiveVerification:
    return AdaptiveVerification(
        num_slots=NUM_SLOTS,
        draft_len=DRAFT_LEN,
        cost=cost,
        objective=BudgetPolicy(hysteresis=0.0),
        skipper=skipper,
    )


def decode_schedule(
    *pending_serials: int, max_budget: int | None = None, draft_cap: int = DRAFT_LEN
) -> Schedule:
    """One decoding row per slot, whose pending proposals have these serials and offer `draft_cap` drafts."""
    rows = []
    for slot, serial in enumerate(pending_serials):
        sequence = make_sequence(f"r{slot}")
        sequence.admit(slot)
        sequence.num_fed = len(sequence.feed)
        sequence.proposal_serial = serial
        rows.append(ScheduledRow(sequence, sequence.decode_row(draft_cap), 1))
    num_drafts = draft_cap * len(rows)
    return Schedule(
        rows,
        num_tokens=len(rows),
        num_draft_tokens=num_drafts,
        num_reserved=num_drafts,
        num_logit_rows=len(rows),
        max_budget=num_drafts if max_budget is None else max_budget,
    )


def record(policy: AdaptiveVerification, serial: int, *confidences: float) -> None:
    """A step has landed in which slot i made a proposal with `confidences[i]` everywhere."""
    slots = np.arange(len(confidences))
    rows = np.repeat(np.array(confidences, np.float32)[:, None], DRAFT_LEN, axis=1)
    policy.on_landing(slots, np.full(len(slots), serial), rows)


def test_plain_decoding_never_drafts() -> None:
    policy = PlainDecoding()
    assert policy.draft_cap == 0
    assert policy.size(decode_schedule(0)) == StepSize(0, drafts=False)


def test_fixed_verification_takes_what_is_offered_and_allowed() -> None:
    policy = FixedVerification(2)
    assert policy.draft_cap == 2
    assert policy.size(decode_schedule(0, 0)) == StepSize(6, drafts=True)
    assert policy.size(decode_schedule(0, 0, max_budget=4)) == StepSize(4, drafts=True)


def test_adaptive_believes_a_request_of_which_nothing_has_landed() -> None:
    assert adaptive(flat_cost()).size(decode_schedule(0, 0)).budget == 6


def test_adaptive_sizes_with_the_proposal_before_the_pending_one() -> None:
    policy = adaptive(flat_cost())
    record(policy, 4, 0.0, 0.9)
    size = policy.size(decode_schedule(5, 5))
    assert size.budget == 3
    assert size.predicted_accepted == pytest.approx(0.9 + 0.81 + 0.729)
    assert size.predicted_ms == pytest.approx(1.0)


@pytest.mark.parametrize(("enabled", "ratio"), [(True, 2.0), (False, 1.0)])
def test_verdicts_correct_what_is_expected(enabled: bool, ratio: float) -> None:
    policy = from_flag(flat_cost(), enable_acceptance_correction=enabled)
    record(policy, 4, 0.25)
    assert policy.size(decode_schedule(5)).predicted_accepted == pytest.approx(0.328125)
    for _ in range(2000):  # more is accepted than one step after the other was sized for
        size = policy.size(decode_schedule(5))
        policy.on_verdicts(decode_schedule(5), size, np.array([3]), np.array([2]))
    expected = ratio * 0.328125
    assert policy.size(decode_schedule(5)).predicted_accepted == pytest.approx(expected)


def test_whether_drafts_pay_is_judged_by_requests_with_a_history() -> None:
    caps, certain = np.full(2, DRAFT_LEN), np.ones((2, DRAFT_LEN), np.float32)
    certain[0] = 0.5
    decision = choose_budget(
        certain,
        caps,
        np.ones(2, int),
        np.ones(2, bool),
        flat_cost(),
        16.0,
        BudgetLimits(max_logit_rows=8),
        BudgetPolicy(hysteresis=0.0),
    )
    of_one = 0.5 + 0.25 + 0.125
    assert decision.predicted_tokens == pytest.approx(2 + DRAFT_LEN + of_one)
    judged = without_belief(decision, caps, np.array([False, True]), 1.0)
    assert judged.predicted_tokens == pytest.approx(2 + 2 * of_one)
    assert without_belief(decision, caps, np.zeros(2, bool), 1.0) is decision
    assert without_belief(decision, caps, np.ones(2, bool), 1.0).num_draft_tokens == 0


def test_what_ended_requests_would_have_accepted_is_not_held_against_the_drafter() -> None:
    policy = from_flag(flat_cost(), enable_acceptance_correction=True)
    record(policy, 4, 0.25, 0.25)
    for _ in range(500):  # one of two requests has ended, the other does as it was expected to
        size = policy.size(decode_schedule(5, 5))
        policy.on_verdicts(decode_schedule(5, 5), size, np.array([3]), np.array([0.328125]))
    size = policy.size(decode_schedule(5, 5))
    assert size.predicted_accepted == pytest.approx(2 * 0.328125, rel=1e-3)


def test_adaptive_never_looks_at_the_pending_proposal() -> None:
    """A request that skipped a step has its pending proposal's confidences on the host: they don't count."""
    policy = adaptive(flat_cost())
    record(policy, 4, 0.0)
    assert policy.size(decode_schedule(4)).budget == 3  # nothing older: believed
    record(policy, 5, 0.9)
    assert policy.size(decode_schedule(5)).budget == 0  # the one before says no
    assert policy.size(decode_schedule(6)).budget == 3


def test_case_22_adaptive_forgets_the_slots_previous_tenant() -> None:
    policy = adaptive(flat_cost())
    record(policy, 4, 0.0)
    policy.on_admit(0, first_serial=6)
    record(policy, 5, 0.0)  # still in flight when the slot changed hands
    assert policy.size(decode_schedule(7)).budget == 3
    record(policy, 6, 0.0)
    assert policy.size(decode_schedule(7)).budget == 0


def test_adaptive_stops_at_the_cliff_and_at_the_logit_rows() -> None:
    policy = adaptive(steep_cost(5))
    record(policy, 1, 0.9, 0.9)
    assert policy.size(decode_schedule(2, 2)).budget == 3
    assert policy.size(decode_schedule(2, 2, max_budget=1)).budget == 1
    assert policy.size(decode_schedule(2, 2, max_budget=0)).budget == 0


def test_adaptive_counts_prompt_tokens_but_not_their_request() -> None:
    policy = adaptive(steep_cost(6))
    schedule = decode_schedule(2)
    prompt = make_sequence("prompt", num_prompt=30)
    prompt.admit(1)
    schedule.rows.append(ScheduledRow(prompt, prompt.prompt_row(4), 4))
    schedule.num_tokens += 4
    schedule.num_logit_rows += 1
    size = policy.size(schedule)
    assert size.budget == 1
    assert size.predicted_accepted == pytest.approx(1.0)


def test_drafter_rests_while_ordinary_decoding_is_faster_and_is_probed() -> None:
    skipper = DraftSkipper(memory=6, probe_interval=3, max_probe_interval=8, probe_len=1)
    policy = adaptive(flat_cost(verify_ms=1.0, draft_ms=50.0), skipper)
    for serial in range(3):
        record(policy, serial, 0.1, 0.1)
    first, second, *rest = (policy.size(decode_schedule(9, 9)) for _ in range(6))
    assert first.drafts
    # The step that stops drafting still verifies what the one before it drafted, at the price of not drafting.
    assert second.drafts is False
    assert second.budget == 6
    assert second.predicted_ms == pytest.approx(1.0)
    assert [(size.drafts, size.budget) for size in rest[:3]] == [
        (False, 6),
        (False, 6),
        (True, 0),
    ]
    assert rest[2].predicted_ms == pytest.approx(51.0)


def test_resting_steps_without_drafts_count_to_the_next_probe() -> None:
    skipper = DraftSkipper(memory=1, probe_interval=3, probe_len=1)
    policy = adaptive(flat_cost(verify_ms=1.0, draft_ms=50.0), skipper)
    for serial in range(3):
        record(policy, serial, 0.1, 0.1)
    assert not policy.size(decode_schedule(9, 9)).drafts
    sizes = [policy.size(decode_schedule(9, 9, draft_cap=0)) for _ in range(3)]
    assert [(size.drafts, size.budget) for size in sizes] == [(False, 0), (False, 0), (True, 0)]
    assert [size.predicted_ms for size in sizes] == pytest.approx([1.0, 1.0, 51.0])


def test_step_times_reach_the_live_correction() -> None:
    class Observed(CostTable):
        def observe(self, *args, **kwargs) -> None:
            seen.append((args, kwargs))

    seen: list = []
    curves = CostCurves(context_len=16, verify={32: 1.0}, draft={NUM_SLOTS: 0.0})
    policy = adaptive(Observed([curves], max_tokens=32, max_requests=NUM_SLOTS))
    size = StepSize(5, drafts=True, context_len=16.0)
    policy.on_step_time(decode_schedule(2, 2), size, 7.5)
    assert seen == [((7, 2), dict(draft=True, context_len=16.0, measured_ms=7.5))]


@pytest.mark.parametrize("skipper", [None, DraftSkipper(memory=2, probe_interval=3)])
async def test_adaptive_streams_are_those_of_ordinary_decoding(skipper) -> None:
    draft_ms = 0.0 if skipper is None else 30.0
    curves = CostCurves(
        context_len=16,
        verify={1: 1.0, 4: 1.1, 8: 1.5, 16: 3.0, 32: 9.0},
        draft={NUM_SLOTS: draft_ms},
    )
    cost = CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS)
    executor = FakeExecutor(num_slots=NUM_SLOTS, draft_len=DRAFT_LEN, step_s=0.0005)
    requests = [make_request(f"r{i}", seed=i, max_tokens=40) for i in range(10)]
    async with serving(executor, adaptive(cost, skipper)) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests):
        check_ordinary(outcome, request, executor.max_model_len)
    budgets = {plan.budget for plan in executor.plans}
    assert len(budgets) > 1
    assert {plan.drafts for plan in executor.plans} == (
        {True} if skipper is None else {True, False}
    )


async def test_case_21_the_engine_feeds_the_policy_older_proposals_only() -> None:
    """Recorded from a real run: no row is ever sized with a proposal that the same step verifies."""

    class Watched(AdaptiveVerification):
        def size(self, schedule: Schedule) -> StepSize:
            for scheduled in schedule.rows:
                if scheduled.row.draft_cap:
                    pending = scheduled.sequence.proposal_serial
                    assert pending != NO_PROPOSAL
                    lags.append(pending - newest.get(scheduled.sequence.slot, pending - 1))
            return super().size(schedule)

        def on_landing(self, slots, serials, confidences) -> None:
            assert np.isfinite(confidences[serials != NO_PROPOSAL]).all()
            newest.update(zip(slots.tolist(), serials.tolist()))
            super().on_landing(slots, serials, confidences)

    lags: list[int] = []
    newest: dict[int, int] = {}
    watched = Watched(
        num_slots=NUM_SLOTS,
        draft_len=DRAFT_LEN,
        cost=flat_cost(),
        objective=BudgetPolicy(),
        skipper=None,
    )
    executor = FakeExecutor(num_slots=NUM_SLOTS, draft_len=DRAFT_LEN, step_s=0.0005)
    async with serving(executor, watched) as engine:
        await collect(engine, make_request(max_tokens=40, ignore_eos=True))
        assert engine.is_healthy, engine.failure
    assert set(lags) == {1}


def test_policies_from_the_flag() -> None:
    def build(config: SpeculativeConfig | None, draft_len: int = 5, cost: CostTable | None = None):
        return policy_from_config(config, num_slots=NUM_SLOTS, draft_len=draft_len, cost=cost)

    assert isinstance(build(None), PlainDecoding)
    assert build(SpeculativeConfig()).draft_cap == 5
    fixed = build(SpeculativeConfig(fixed_verify_len=2))
    assert isinstance(fixed, FixedVerification)
    assert fixed.draft_cap == 2
    assert build(SpeculativeConfig(fixed_verify_len=0)).draft_cap == 0
    config = SpeculativeConfig(enable_adaptive_verification=True)
    assert isinstance(build(config, cost=flat_cost()), AdaptiveVerification)
    with pytest.raises(ValueError, match="no drafter; leave --speculative-config out"):
        build(SpeculativeConfig(), draft_len=0)
    with pytest.raises(ValueError, match=r"measured step times.*enable_adaptive_verification"):
        build(config)


def from_flag(cost: CostTable, **options: object) -> AdaptiveVerification:
    text = json.dumps({"enable_adaptive_verification": True, **options})
    config = parse_speculative_config(text)
    policy = policy_from_config(config, num_slots=NUM_SLOTS, draft_len=DRAFT_LEN, cost=cost)
    assert isinstance(policy, AdaptiveVerification)
    return policy


@pytest.mark.parametrize(("smoothing", "budget"), [(None, 0), (0.8, 3)])
def test_smoothing_comes_from_the_flag(smoothing: float | None, budget: int) -> None:
    policy = from_flag(flat_cost(), confidence_smoothing=smoothing)
    record(policy, 1, 0.9)
    record(policy, 2, 0.0)
    # What is left of the older proposal is worth a draft that costs nothing.
    assert policy.size(decode_schedule(3)).budget == budget


@pytest.mark.parametrize(("hysteresis", "budget"), [(0.0, 1), (0.5, 0)])
def test_hysteresis_comes_from_the_flag(hysteresis: float, budget: int) -> None:
    policy = from_flag(steep_cost(2), hysteresis=hysteresis)
    record(policy, 1, 0.3)
    assert policy.size(decode_schedule(2)).budget == budget


@pytest.mark.parametrize(("bound", "budget"), [(None, 1), (0.9, 0)])
def test_target_token_ms_comes_from_the_flag(bound: float | None, budget: int) -> None:
    curves = CostCurves(context_len=16, verify={2: 0.8, 3: 1.0, 32: 99.0}, draft={NUM_SLOTS: 0.0})
    cost = CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS)
    policy = from_flag(cost, target_token_ms=bound)
    record(policy, 1, 0.9, 0.1)
    # A draft of the first request delays the second, which gets nothing.
    assert policy.size(decode_schedule(2, 2)).budget == budget


@pytest.mark.parametrize(("enabled", "modes"), [(True, {True, False}), (False, {True})])
def test_drafter_skipping_comes_from_the_flag(enabled: bool, modes: set[bool]) -> None:
    policy = from_flag(flat_cost(draft_ms=50.0), enable_drafter_skipping=enabled)
    record(policy, 1, 0.1, 0.1)
    sizes = [policy.size(decode_schedule(2, 2)) for _ in range(300)]
    assert {size.drafts for size in sizes} == modes
    if enabled:
        resting = [size.drafts for size in sizes].index(False)
        assert True in [size.drafts for size in sizes[resting:]], "the drafter is never probed"


async def test_min_depth_reaches_the_allocation() -> None:
    """Drafts are far too dear, and still every request gets its first one verified."""

    class Watched(FakeExecutor):
        def _admit_drafts(self, plan):
            lens = super()._admit_drafts(plan)
            admitted.append([n for n, row in zip(lens.tolist(), plan.rows) if row.draft_cap])
            return lens

    curves = CostCurves(
        context_len=16, verify={n: 4.0**n for n in range(1, 33)}, draft={NUM_SLOTS: 0.0}
    )
    cost = CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS)
    policy = from_flag(cost, min_depth=1, enable_drafter_skipping=False)
    admitted: list[list[int]] = []
    executor = Watched(num_slots=NUM_SLOTS, draft_len=DRAFT_LEN, agreement=0.0)
    requests = [
        make_request(f"r{i}", seed=i, max_tokens=20, ignore_eos=True) for i in range(NUM_SLOTS)
    ]
    async with serving(executor, policy) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests):
        check_ordinary(outcome, request, executor.max_model_len)
    assert {plan.min_depth for plan in executor.plans} == {1}
    # The rows of a request that ends in a step in flight offer drafts that the device no longer has.
    running = [n for step in admitted[:15] for n in step]
    assert len(running) > 20
    assert set(running) == {1}


async def test_case_12_confidences_that_are_none_are_counted() -> None:
    class Broken(FakeExecutor):
        def _run(self, plan):
            outputs = super()._run(plan)
            if outputs.confidences.size:
                outputs.confidences[:, 0] = np.nan
            return outputs

    metrics = Metrics("fake")
    executor = Broken(num_slots=NUM_SLOTS, draft_len=DRAFT_LEN)
    policy = from_flag(flat_cost())
    request = make_request(max_tokens=20, ignore_eos=True)
    async with serving(executor, policy, metrics=metrics) as engine:
        check_ordinary(await collect(engine, request), request, executor.max_model_len)
    # NaN counts as 0: once the first ones are known nothing more is verified.
    assert [plan.budget for plan in executor.plans[4:]] == [0] * (len(executor.plans) - 4)
    assert sample(metrics.registry, "dspark:sanitised_confidences_total") >= 10
