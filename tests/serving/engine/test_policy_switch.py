"""Other policies and fewer step sizes in a server that runs, for benchmarks."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fastapi import FastAPI

from dspark_jax.budget import CostCurves, CostTable
from dspark_jax.serving.api.benchmark import add_policy_route
from dspark_jax.serving.api.errors import install_error_handlers
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.intake import EngineUnavailable
from dspark_jax.serving.policy import PlainDecoding
from dspark_jax.serving.policy_switch import PolicySwitch
from dspark_jax.serving.speculative_config import SpeculativeConfig
from tests.serving.clients import client_of
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.harness import (
    check_ordinary,
    collect,
    make_request,
    serving,
    until,
)

BUCKETS = (1, 2, 4, 8, 16, 32)
ADAPTIVE = SpeculativeConfig(enable_adaptive_verification=True)
CONFIG = ServeConfig(speculative_config=ADAPTIVE)


def executor(**changes) -> FakeExecutor:
    curve = CostCurves(context_len=0, verify={b: 1 + b / 64 for b in BUCKETS}, draft={4: 0.1})
    table = CostTable([curve], max_tokens=32, max_requests=4)
    return FakeExecutor(buckets=BUCKETS, cost_table=table, **changes)


async def switched(switch: PolicySwitch, *args) -> dict:
    """Once the engine's thread sleeps."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(EngineUnavailable):
                return await asyncio.to_thread(switch.change, *args)
            await asyncio.sleep(0.01)


async def test_every_policy_in_one_server_gives_the_right_tokens():
    device = executor()
    async with serving(device) as engine:
        switch = PolicySwitch(engine, device, CONFIG)
        for number, (speculative, most, budgets) in enumerate(
            [
                (None, None, {0}),
                (SpeculativeConfig(fixed_verify_len=1), None, {0, 1}),
                (SpeculativeConfig(), 8, {0, 1, 2, 3}),
                (ADAPTIVE, 2, {0, 1, 2, 3}),
                (ADAPTIVE, 32, {0, 1, 2, 3}),
            ]
        ):
            said = await switched(switch, speculative, most)
            device.plans.clear()
            request = make_request(f"r{number}", max_tokens=20)
            check_ordinary(await collect(engine, request), request, device.max_model_len)
            assert {plan.budget for plan in device.plans} <= budgets
            assert {plan.bucket for plan in device.plans} <= set(said["buckets"])
            if most is not None:
                assert said["buckets"] == list(BUCKETS)  # doublings above any limit
            if speculative is None:
                assert not any(plan.drafts for plan in device.plans)


async def test_not_while_a_request_runs():
    device = executor(step_s=0.05)
    async with serving(device) as engine:
        request = make_request(max_tokens=40, ignore_eos=True)
        running = asyncio.create_task(collect(engine, request))
        await until(lambda: len(device.plans) > 1)
        with pytest.raises(EngineUnavailable, match="requests are running"):
            engine.change_policy(PlainDecoding())
        await running
        await switched(PolicySwitch(engine, device, CONFIG), None, None)


async def test_what_the_programs_cannot_do_is_refused():
    device = executor()
    async with serving(device) as engine:
        switch = PolicySwitch(engine, device, CONFIG)
        with pytest.raises(FlagError, match="cannot change while the server runs"):
            switch.change(SpeculativeConfig(rejection_sample_method="coupled"), None)
        with pytest.raises(FlagError, match="without a drafter"):
            PolicySwitch(engine, device, ServeConfig()).change(ADAPTIVE, None)
        with pytest.raises(ValueError, match="the last included"):
            engine.change_policy(PlainDecoding(), (1, 2))


async def test_the_route():
    device = executor()
    async with serving(device) as engine:
        app = FastAPI()
        install_error_handlers(app)
        add_policy_route(app, PolicySwitch(engine, device, CONFIG))
        async with client_of(app) as client:
            post = lambda body: client.post("/benchmark/policy", json=body)
            answer = await post({"speculative_config": {"fixed_verify_len": 2}})
            assert answer.json() == {"mode": "fixed", "draft_cap": 2, "buckets": list(BUCKETS)}
            answer = await post({"speculative_config": None, "max_capture_tokens": 4})
            assert answer.json() == {"mode": "none", "draft_cap": 0, "buckets": list(BUCKETS)}
            for body, message in [
                ({"policy": 1}, "must be a JSON object of"),
                ([], "must be a JSON object of"),
                ({"max_capture_tokens": 0}, "must be a positive integer"),
                ({"speculative_config": {"k": 1}}, "unknown key 'k'"),
                ({"speculative_config": {"rejection_sample_method": "coupled"}}, "cannot change"),
            ]:
                answer = await post(body)
                assert answer.status_code == 400
                assert message in answer.json()["error"]["message"]


async def test_step_sizes_above_a_limit_only_double():
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    curve = CostCurves(context_len=0, verify={b: 1 + b / 64 for b in sizes}, draft={4: 0.1})
    table = CostTable([curve], max_tokens=32, max_requests=4)
    device = FakeExecutor(buckets=sizes, cost_table=table)
    async with serving(device) as engine:
        switch = PolicySwitch(engine, device, CONFIG)
        assert (await switched(switch, ADAPTIVE, 4))["buckets"] == [1, 2, 3, 4, 8, 16, 32]
        request = make_request(max_tokens=20)
        check_ordinary(await collect(engine, request), request, device.max_model_len)
        assert {plan.bucket for plan in device.plans} <= {1, 2, 3, 4, 8, 16, 32}
        assert (await switched(switch, ADAPTIVE, 3))["buckets"] == [1, 2, 3, 6, 12, 24, 32]
        with pytest.raises(FlagError, match="the smallest is 1"):
            switch.change(None, 0)
