"""The step loop: ends of requests, log-probabilities, aborts, refusals, draining and failures."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from dspark_jax.decode.plan import StepPlan
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.intake import EngineUnavailable
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.policy import FixedVerification
from dspark_jax.serving.request import FinishReason, TokenLogprob
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.fake_model import ordinary_output, score
from tests.serving.engine.harness import (
    MODEL_CONFIG,
    TIMEOUT_S,
    check_ordinary,
    collect,
    make_request,
    sample,
    serving,
    until,
)

ENDLESS = dict(max_tokens=10**6, ignore_eos=True)


def long_executor(**changes) -> FakeExecutor:
    """Room for requests that outlive a test."""
    fields = dict(num_pages=4000, max_model_len=4000, page_size=16)
    return FakeExecutor(**(fields | changes))


async def test_many_requests_share_the_steps() -> None:
    executor = FakeExecutor(num_slots=3, step_s=0.001)
    requests = [make_request(f"r{i}", seed=i, prompt=(i + 2,) * (i + 1)) for i in range(12)]
    async with serving(executor) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests):
        check_ordinary(outcome, request, executor.max_model_len)
    assert executor.most_in_flight == 2
    assert executor.num_warm_ups == 1
    assert max(len(plan.rows) for plan in executor.plans) == 3


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_ends_exactly_at_max_tokens(max_tokens: int) -> None:
    request = make_request(max_tokens=max_tokens, ignore_eos=True)
    async with serving(FakeExecutor(agreement=1.0)) as engine:
        outcome = await collect(engine, request)
    assert len(outcome.tokens) == max_tokens
    check_ordinary(outcome, request, engine.max_model_len)


async def test_case_40_ends_exactly_at_the_end_of_the_context() -> None:
    executor = FakeExecutor(max_model_len=16, agreement=1.0)
    request = make_request(**ENDLESS)
    async with serving(executor) as engine:
        outcome = await collect(engine, request)
    assert len(outcome.tokens) == 16 - len(request.prompt_token_ids)
    check_ordinary(outcome, request, 16)


@pytest.mark.parametrize("agreement", [0.0, 1.0])
async def test_ends_at_a_stop_id_even_inside_an_accepted_draft(agreement: float) -> None:
    tokens, _ = ordinary_output(make_request(ignore_eos=True), 64)
    for position in range(6):
        if tokens[position] in tokens[:position]:
            continue
        request = make_request(ignore_eos=True, stop_token_ids=(tokens[position],))
        async with serving(FakeExecutor(agreement=agreement)) as engine:
            outcome = await collect(engine, request)
        assert outcome.tokens == tokens[: position + 1]
        assert outcome.finish_reason is FinishReason.STOP
        assert outcome.last.stop_token_id == tokens[position]


async def test_min_tokens_keeps_stop_ids_away() -> None:
    tokens, _ = ordinary_output(make_request(ignore_eos=True), 64)
    request = make_request(ignore_eos=True, stop_token_ids=(tokens[1],), min_tokens=6)
    async with serving(FakeExecutor()) as engine:
        outcome = await collect(engine, request)
    assert len(outcome.tokens) > 6
    check_ordinary(outcome, request, engine.max_model_len)


async def test_a_request_without_seed_draws_one_from_the_engines() -> None:
    streams = []
    for engine_seed in (1, 1, 2):
        async with serving(FakeExecutor(), seed=engine_seed) as engine:
            outcome = await collect(engine, make_request(seed=None, ignore_eos=True))
            streams.append(outcome.tokens)
    assert streams[0] == streams[1] != streams[2]


async def test_log_probabilities_belong_to_their_tokens() -> None:
    request = make_request(logprobs=2, max_tokens=9, ignore_eos=True)
    plain = make_request("plain", seed=3)
    async with serving(FakeExecutor(agreement=0.8)) as engine:
        outcome, without = await asyncio.gather(collect(engine, request), collect(engine, plain))
    context = list(request.prompt_token_ids)
    for chunk in outcome.chunks:
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.token_ids)
        for token, entry in zip(chunk.token_ids, chunk.logprobs):
            chosen, top_ids, top = score(context, token)
            assert entry == TokenLogprob(token, chosen, dict(zip(top_ids[:2], top[:2])))
            context.append(token)
    assert all(chunk.logprobs is None for chunk in without.chunks)


@pytest.mark.parametrize("logit_rows", [3, 32])
async def test_prompt_log_probabilities_arrive_once_and_whole(logit_rows: int) -> None:
    prompt = tuple(range(3, 23))
    request = make_request(prompt=prompt, prompt_logprobs=1, ignore_eos=True)
    executor = FakeExecutor(buckets=(1, 2, 4, 8), logit_rows=logit_rows, num_slots=3, draft_len=2)
    others = [make_request(f"o{i}", seed=i) for i in range(3)]
    async with serving(executor) as engine:
        outcome, *rest = await asyncio.gather(*(collect(engine, r) for r in (request, *others)))
    scores = outcome.chunks[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    for i in range(1, len(prompt)):
        chosen, top_ids, top = score(prompt[:i], prompt[i])
        assert scores[i] == TokenLogprob(prompt[i], chosen, {top_ids[0]: top[0]})
    assert all(chunk.prompt_logprobs is None for chunk in outcome.chunks[1:])
    assert all(o.chunks[0].prompt_logprobs is None for o in rest)
    check_ordinary(outcome, request, executor.max_model_len)


async def test_preempted_requests_stream_on_without_loss_or_repetition() -> None:
    # Pages for little more than one request, four of which want to run.
    executor = FakeExecutor(num_pages=14, page_size=4, max_model_len=48, agreement=0.5)
    metrics = Metrics("fake")
    requests = [
        make_request(f"r{i}", seed=i, max_tokens=40, ignore_eos=True, prompt_logprobs=0)
        for i in range(4)
    ]
    async with serving(executor, metrics=metrics) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for outcome, request in zip(outcomes, requests):
        check_ordinary(outcome, request, executor.max_model_len)
        assert [c.prompt_logprobs is None for c in outcome.chunks].count(False) == 1
    assert sample(metrics.registry, "vllm:num_preemptions_total") > 0
    # Fed again: the prompt and what had been streamed by then.
    refed = [
        row
        for plan in executor.plans
        for row in plan.rows
        if row.prompt_ids is not None and len(row.prompt_ids) > row.prompt_len
    ]
    assert refed


async def test_a_closed_stream_leaves_the_steps_at_once() -> None:
    executor = long_executor(step_s=0.002)
    async with serving(executor) as engine:
        other = asyncio.create_task(collect(engine, make_request("other", seed=1, **ENDLESS)))
        await collect(engine, make_request("leaver", seed=2, **ENDLESS), stop_after=5)
        num_plans = len(executor.plans)
        await until(lambda: len(executor.plans) >= num_plans + 4)
        # The step being planned while the stream was closed may still have it.
        for plan in executor.plans[num_plans + 1 :]:
            assert [row.seed for row in plan.rows] == [1]
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other


async def test_a_request_closed_while_it_waits_never_runs() -> None:
    executor = long_executor(num_slots=1, step_s=0.001)
    async with serving(executor) as engine:
        running = asyncio.create_task(
            collect(engine, make_request("runs", **ENDLESS), stop_after=40)
        )
        await asyncio.sleep(0.005)
        waiting = asyncio.create_task(collect(engine, make_request("waits", seed=7)))
        await asyncio.sleep(0.005)
        waiting.cancel()
        await running
        await asyncio.to_thread(engine.shutdown)
    assert all(row.seed != 7 for plan in executor.plans for row in plan.rows)


async def test_non_finite_logits_fail_their_own_request_only() -> None:
    executor = FakeExecutor()
    executor.non_finite_seeds = {13}
    metrics = Metrics("fake")
    good, bad = make_request("good", seed=1), make_request("bad", seed=13)
    async with serving(executor, metrics=metrics) as engine:
        outcome, failed = await asyncio.gather(collect(engine, good), collect(engine, bad))
        assert engine.is_healthy
        again = await collect(engine, make_request("again", seed=2))
    check_ordinary(outcome, good, executor.max_model_len)
    check_ordinary(again, make_request("again", seed=2), executor.max_model_len)
    assert failed.tokens == []
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.last.error == "the model's logits were not finite"
    assert sample(metrics.registry, "dspark:non_finite_rows_total") == 1


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
async def test_a_failing_step_ends_every_request_with_the_reason(where: str) -> None:
    executor = FakeExecutor(num_slots=2, num_pages=1000, max_model_len=1000, step_s=0.001)
    is_failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def explode(plan: StepPlan) -> None:
        if len(executor.plans) == 5:
            error = RuntimeError("the device fell off the bus")
            if where == "dispatch":
                raise error
            executor.fail_at_fetch = error

    executor.on_dispatch = explode
    async with serving(
        executor, on_failure=lambda: loop.call_soon_threadsafe(is_failed.set)
    ) as engine:
        requests = [make_request(f"r{i}", seed=i, **ENDLESS) for i in range(4)]
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
        for outcome, request in zip(outcomes, requests):
            assert outcome.finish_reason is FinishReason.ERROR
            assert outcome.last.error == "RuntimeError: the device fell off the bus"
            expected, _ = ordinary_output(request, executor.max_model_len)
            assert outcome.tokens == expected[: len(outcome.tokens)]
        assert not engine.is_healthy
        assert engine.failure == "RuntimeError: the device fell off the bus"
        await asyncio.wait_for(is_failed.wait(), TIMEOUT_S)
        with pytest.raises(EngineUnavailable, match="fell off the bus"):
            await collect(engine, make_request("late"))


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    executor = FakeExecutor(num_slots=1, step_s=0.002)
    requests = [make_request(f"r{i}", seed=i, ignore_eos=True) for i in range(3)]
    async with serving(executor) as engine:
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await asyncio.sleep(0.005)
        stopping = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await until(lambda: engine.is_draining)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await collect(engine, make_request("late"))
        for task, request in zip(tasks, requests):
            check_ordinary(await task, request, executor.max_model_len)
        await asyncio.wait_for(stopping, TIMEOUT_S)
        assert engine.is_healthy
    assert executor.in_flight == []


async def test_a_drain_can_be_cut_short() -> None:
    executor = long_executor(num_slots=1, step_s=0.001)
    async with serving(executor) as engine:
        tasks = [
            asyncio.create_task(collect(engine, make_request(f"r{i}", seed=i, **ENDLESS)))
            for i in range(2)
        ]
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(asyncio.to_thread(engine.shutdown))
        await asyncio.sleep(0.01)
        assert not draining.done()
        await asyncio.to_thread(engine.shutdown, drain=False)
        await asyncio.wait_for(draining, TIMEOUT_S)
        for task in tasks:
            assert (await task).finish_reason is FinishReason.ABORT
    assert executor.in_flight == []


async def test_the_number_of_open_requests_is_bounded() -> None:
    executor = long_executor(step_s=0.001)
    async with serving(executor, max_open_requests=2) as engine:
        tasks = [
            asyncio.create_task(
                collect(engine, make_request(f"r{i}", seed=i, **ENDLESS), stop_after=30)
            )
            for i in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="2 requests are open"):
            await collect(engine, make_request("third"))
        await asyncio.gather(*tasks)
        third = make_request("third")
        check_ordinary(await collect(engine, third), third, executor.max_model_len)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompt=()), "0 tokens; it must have 1 to 63"),
        (dict(prompt=(2,) * 64), "64 tokens; it must have 1 to 63"),
        (dict(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (dict(max_tokens=61), "needs 16 cache pages, there are 15"),
    ],
)
async def test_requests_that_cannot_run_are_refused(changes: dict, message: str) -> None:
    async with serving(FakeExecutor(num_pages=15)) as engine:
        with pytest.raises(ValueError, match=message):
            await collect(engine, make_request(**changes))
        assert engine.is_healthy


async def test_an_id_can_be_used_again_only_after_its_request_has_closed() -> None:
    async with serving(long_executor(step_s=0.001)) as engine:
        first = asyncio.create_task(collect(engine, make_request("same", **ENDLESS), stop_after=20))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'same' is open already"):
            await collect(engine, make_request("same"))
        await first
        request = make_request("same")
        check_ordinary(await collect(engine, request), request, engine.max_model_len)


async def test_before_start_and_after_shutdown_requests_are_refused() -> None:
    engine = Engine(
        FakeExecutor(),
        model_config=MODEL_CONFIG,
        metrics=Metrics("fake"),
        build_policy=lambda executor: FixedVerification(3),
    )
    with pytest.raises(EngineUnavailable, match="not started"):
        await collect(engine, make_request())
    engine.start()
    with pytest.raises(RuntimeError, match="started already"):
        engine.start()
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await collect(engine, make_request())


async def test_requests_of_a_closed_event_loop_are_dropped() -> None:
    executor = long_executor(num_slots=1, step_s=0.001)
    async with serving(executor, max_open_requests=1) as engine:
        stream = engine.generate(make_request("orphan", **ENDLESS))

        def orphan() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(anext(stream))
            loop.close()

        await asyncio.to_thread(orphan)
        request = make_request("next", seed=5)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(EngineUnavailable):
                    outcome = await collect(engine, request)
                    break
                await asyncio.sleep(0.001)
        check_ordinary(outcome, request, executor.max_model_len)
        assert engine.is_healthy


async def test_counts_of_the_request_and_of_the_metrics_agree() -> None:
    metrics = Metrics("fake")
    requests = [make_request(f"r{i}", seed=i, max_tokens=30, ignore_eos=True) for i in range(4)]
    executor = FakeExecutor(agreement=0.7)
    async with serving(executor, metrics=metrics) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    stats = [outcome.last.speculation for outcome in outcomes]
    assert all(s is not None for s in stats)
    assert all(c.speculation is None for outcome in outcomes for c in outcome.chunks[:-1])
    for name, attribute in (
        ("vllm:spec_decode_num_drafts_total", "num_drafts"),
        ("vllm:spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("dspark:draft_tokens_admitted_total", "num_admitted_tokens"),
        ("vllm:spec_decode_num_accepted_tokens_total", "num_accepted_tokens"),
    ):
        total = sum(getattr(s, attribute) for s in stats)
        assert total > 0
        assert sample(metrics.registry, name) == total
    for outcome, s in zip(outcomes, stats):
        # One token from the prompt's row, and one of each verification besides the accepted drafts.
        assert len(outcome.tokens) >= 1 + s.num_drafts + s.num_accepted_tokens
        assert s.num_accepted_tokens <= s.num_admitted_tokens <= s.num_draft_tokens
    assert sample(metrics.registry, "dspark:host_time_seconds_count") == len(executor.plans)
    assert sample(metrics.registry, "dspark:host_time_seconds_sum") > 0


async def test_accepted_drafts_shorten_the_run() -> None:
    num_steps = {}
    for agreement in (0.0, 1.0):
        executor = FakeExecutor(agreement=agreement)
        async with serving(executor) as engine:
            await collect(engine, make_request(max_tokens=40, ignore_eos=True))
        num_steps[agreement] = len(executor.plans)
    assert 3 * num_steps[1.0] <= num_steps[0.0]
