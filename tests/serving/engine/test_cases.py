"""Numbered cases of adaptive verification that concern the engine around the steps."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from dspark_jax.budget import BudgetPolicy, CostCurves, CostTable
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.intake import EngineUnavailable
from dspark_jax.serving.metrics import Metrics, StepReport
from dspark_jax.serving.policy import AdaptiveVerification, FixedVerification, policy_from_config
from dspark_jax.serving.speculative_config import parse_speculative_config
from tests.seeds import fresh_seed
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.harness import (
    MODEL_CONFIG,
    ForcedBudget,
    check_ordinary,
    collect,
    make_request,
    sample,
    serving,
)


def cost_table(
    verify: dict[int, float], *, draft_ms: float = 0.0, max_requests: int = 4
) -> CostTable:
    curves = CostCurves(context_len=16, verify=verify, draft={max_requests: draft_ms})
    return CostTable([curves], max_tokens=max(verify), max_requests=max_requests)


@pytest.mark.parametrize("budget", [5, 6, 7])
@pytest.mark.parametrize("buckets", [(8, 16), (16,)], ids=["several", "single"])
async def test_case_31_budgets_around_the_edge_of_a_bucket(budget, buckets):
    """Two requests and 5, 6 or 7 drafts: 7, 8 or 9 tokens."""
    executor = FakeExecutor(num_slots=2, draft_len=7, buckets=buckets, seed=fresh_seed())
    requests = [make_request(f"r{i}", seed=i, max_tokens=40, ignore_eos=True) for i in range(2)]
    async with serving(executor, ForcedBudget(7, lambda most: min(most, budget))) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests, strict=True):
        check_ordinary(outcome, request, executor.max_model_len)
    full = [p for p in executor.plans if p.budget == budget and len(p.rows) == 2]
    assert full
    expected = 8 if buckets[0] == 8 and 2 + budget <= 8 else 16
    assert {p.bucket for p in full if all(r.draft_cap for r in p.rows)} == {expected}


async def test_case_39_from_full_load_to_none():
    """256 requests drain through idle slots, mixed steps and prompts alone; nothing hangs or is lost."""
    rng = random.Random(fresh_seed())
    executor = FakeExecutor(
        num_slots=256,
        draft_len=3,
        buckets=(1, 8, 64, 256, 1024),
        num_pages=256 * 16,
        logit_rows=1024,
    )
    curve = {b: 1.0 + 0.01 * b for b in executor.buckets}
    policy = AdaptiveVerification(
        num_slots=256,
        draft_len=3,
        cost=cost_table(curve, draft_ms=0.5, max_requests=256),
        objective=BudgetPolicy(),
        skipper=None,
    )
    requests = [
        make_request(
            f"r{i}",
            prompt=tuple(rng.randrange(2, 50) for _ in range(rng.randrange(1, 40))),
            seed=i,
            max_tokens=rng.randrange(1, 20),
        )
        for i in range(256)
    ]
    metrics = Metrics("fake")
    async with serving(executor, policy, metrics=metrics) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
        assert engine.is_healthy
    for outcome, request in zip(outcomes, requests, strict=True):
        check_ordinary(outcome, request, executor.max_model_len)
    assert max(len(plan.rows) for plan in executor.plans) > 64
    # Some requests of the longest length end together.
    assert len(executor.plans[-1].rows) < 64
    assert sample(metrics.registry, "vllm:num_requests_running") == 0
    assert sample(metrics.registry, "vllm:kv_cache_usage_perc") == 0


async def test_case_41_nothing_is_sized_before_the_costs_are_measured():
    """The policy is made from the table that the warm-up left; a warm-up that fails can be tried again."""

    class Calibrating(FakeExecutor):
        def warm_up(self) -> None:
            super().warm_up()
            assert not self.plans
            if self.num_warm_ups == 1:
                raise MemoryError("while measuring")
            self.cost_table = cost_table({32: 1.0})

    config = parse_speculative_config('{"enable_adaptive_verification": true}')
    executor = Calibrating()

    def build(warm: Calibrating):
        built.append(warm.num_warm_ups)
        return policy_from_config(
            config, num_slots=warm.num_slots, draft_len=warm.draft_len, cost=warm.cost_table
        )

    built: list[int] = []
    engine = Engine(
        executor, model_config=MODEL_CONFIG, metrics=Metrics("fake"), build_policy=build
    )
    with pytest.raises(MemoryError):
        engine.start()
    assert built == []
    with pytest.raises(EngineUnavailable, match="has not started"):
        await collect(engine, make_request())
    engine.start()
    try:
        request = make_request()
        check_ordinary(await collect(engine, request), request, executor.max_model_len)
    finally:
        await asyncio.to_thread(engine.shutdown, drain=False)
    assert built == [2]


async def conditional_acceptance(policy, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts tried at each position, their prefix accepted, and those accepted, over a long run."""

    class Recorded(Metrics):
        def on_step(self, report: StepReport) -> None:
            super().on_step(report)
            reports.append(report)

    reports: list[StepReport] = []
    executor = FakeExecutor(
        num_slots=32,
        draft_len=3,
        buckets=(8, 32, 64, 96, 128),
        num_pages=32 * 24,
        page_size=8,
        max_model_len=192,
        logit_rows=128,
        agreement=0.7,
        seed=seed,
    )
    requests = [make_request(f"r{i}", seed=i, max_tokens=180, ignore_eos=True) for i in range(32)]
    async with serving(executor, policy, metrics=Recorded("fake")) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests, strict=True):
        check_ordinary(outcome, request, executor.max_model_len)
    assert len({plan.bucket for plan in executor.plans}) > 2
    accepted = np.concatenate([r.accepted for r in reports])[:, None]
    admitted = np.concatenate([r.admitted for r in reports])[:, None]
    position = np.arange(3)
    is_tried = (position < admitted) & (position <= accepted)
    return is_tried.sum(0), (is_tried & (position < accepted)).sum(0)


async def test_case_42_acceptance_of_what_is_verified_is_that_of_fixed_verification():
    """The soak at full context lengths is `benchmarks/soak.py`; here is its statistic.

    A budget must not change which tokens a verified draft has: the fake drafter agrees with a fixed probability,
    whatever its confidence.
    """
    seed = fresh_seed()
    curve = {8: 1.0, 32: 1.02, 64: 1.1, 96: 1.25, 128: 1.5}
    adaptive = AdaptiveVerification(
        num_slots=32,
        draft_len=3,
        cost=cost_table(curve, max_requests=32),
        objective=BudgetPolicy(),
        skipper=None,
    )
    tried, accepted = await conditional_acceptance(adaptive, seed)
    fixed_tried, fixed_accepted = await conditional_acceptance(FixedVerification(3), seed + 1)
    assert (tried > 200).all()
    assert tried[2] < fixed_tried[2]  # the budget had a say
    pooled = (accepted + fixed_accepted) / (tried + fixed_tried)
    noise = np.sqrt(pooled * (1 - pooled) * (1 / tried + 1 / fixed_tried))
    assert (np.abs(accepted / tried - fixed_accepted / fixed_tried) < 5 * noise).all()
