"""Prefix caching through the real step loop, over the fake executor: what is streamed, counted and copied."""

from __future__ import annotations

import asyncio

import pytest

from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import FinishReason
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.harness import (
    check_ordinary,
    collect,
    make_request,
    sample,
    serving,
    until,
)

PROMPT = tuple(i % 47 for i in range(5, 27))  # five pages and a half


def make_executor(**changes) -> FakeExecutor:
    fields = dict(num_slots=4, num_pages=96, max_model_len=64, agreement=0.7)
    return FakeExecutor(**(fields | changes))


@pytest.mark.parametrize("draft_len", [0, 3])
async def test_the_text_of_a_hit_is_that_of_ordinary_decoding(draft_len: int) -> None:
    executor, metrics = make_executor(draft_len=draft_len), Metrics("fake")
    cached = []
    async with serving(executor, metrics=metrics) as engine:
        for i, prompt in enumerate((PROMPT, PROMPT, (*PROMPT, 3, 4, 5), PROMPT[:10])):
            request = make_request(f"r{i}", prompt, seed=i, max_tokens=20)
            outcome = await collect(engine, request)
            check_ordinary(outcome, request, executor.max_model_len)
            cached.append(outcome.chunks[0].num_cached_tokens)
            assert all(chunk.num_cached_tokens is None for chunk in outcome.chunks[1:])
    assert cached == [0, 20, 20, 0]
    assert sample(metrics.registry, "vllm:prefix_cache_queries_total") == 22 + 22 + 25 + 10
    assert sample(metrics.registry, "vllm:prefix_cache_hits_total") == sum(cached)
    assert (executor.num_saves, executor.num_restores) == (3, 2)


async def test_without_snapshots_nothing_is_cut_counted_or_copied() -> None:
    executor, metrics = make_executor(num_snapshots=0), Metrics("fake")
    async with serving(executor, metrics=metrics) as engine:
        for name in "ab":
            request = make_request(name, PROMPT)
            outcome = await collect(engine, request)
            check_ordinary(outcome, request, executor.max_model_len)
            assert outcome.chunks[0].num_cached_tokens is None
    lengths = [row.num_tokens for plan in executor.plans for row in plan.rows if row.samples]
    assert lengths.count(len(PROMPT)) == 2
    assert sample(metrics.registry, "vllm:prefix_cache_queries_total") == 0
    assert executor.num_saves == executor.num_restores == 0


async def test_many_at_once_share_a_beginning() -> None:
    executor = make_executor(num_slots=8, num_pages=60, buckets=(8, 16, 32, 64), logit_rows=64)
    requests = [make_request(f"r{i}", (*PROMPT, i, i), seed=i, max_tokens=25) for i in range(24)]
    async with serving(executor) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
        assert engine.failure is None
    for request, outcome in zip(requests, outcomes):
        check_ordinary(outcome, request, executor.max_model_len)
    assert sum(outcome.chunks[0].num_cached_tokens > 0 for outcome in outcomes) >= 12


async def test_more_prompts_than_places_for_snapshots_are_fed_in_full_again() -> None:
    executor = make_executor(num_snapshots=1)
    prompts = [tuple((i + 7 * n) % 50 for i in range(12)) for n in range(3)]
    cached = []
    async with serving(executor) as engine:
        for i, n in enumerate((0, 1, 0, 0, 2, 2)):
            request = make_request(f"r{i}", prompts[n], seed=i)
            outcome = await collect(engine, request)
            check_ordinary(outcome, request, executor.max_model_len)
            cached.append(outcome.chunks[0].num_cached_tokens)
    assert cached == [0, 0, 0, 8, 0, 8]


async def test_requests_that_are_preempted_and_come_back_stream_the_same_text() -> None:
    executor = make_executor(num_pages=20, agreement=0.5)
    metrics = Metrics("fake")
    requests = [
        make_request(f"r{i}", (*PROMPT[:14], i), seed=i, max_tokens=40, ignore_eos=True)
        for i in range(8)
    ]
    async with serving(executor, metrics=metrics) as engine:
        outcomes = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, outcome in zip(requests, outcomes):
        check_ordinary(outcome, request, executor.max_model_len)
    assert sample(metrics.registry, "vllm:num_preemptions_total") > 0
    assert executor.num_restores > 0
    # Only first admissions count.
    assert sample(metrics.registry, "vllm:prefix_cache_queries_total") == 8 * 15


async def test_a_scored_prompt_is_fed_in_full_and_does_not_count() -> None:
    executor, metrics = make_executor(), Metrics("fake")
    async with serving(executor, metrics=metrics) as engine:
        await collect(engine, make_request("first", PROMPT))
        request = make_request("scored", PROMPT, prompt_logprobs=1)
        outcome = await collect(engine, request)
        check_ordinary(outcome, request, executor.max_model_len)
        assert outcome.chunks[0].num_cached_tokens == 0
    assert executor.num_restores == 0
    assert sample(metrics.registry, "vllm:prefix_cache_queries_total") == len(PROMPT)


async def test_nothing_that_a_failed_request_may_have_spoilt_is_used_again() -> None:
    executor = make_executor()
    executor.non_finite_seeds.add(9)
    async with serving(executor) as engine:
        await collect(engine, make_request("first", PROMPT, seed=1))
        bad = await collect(engine, make_request("bad", PROMPT, seed=9))
        assert bad.finish_reason is FinishReason.ERROR
        assert executor.num_restores == 1
        again = await collect(engine, make_request("again", PROMPT, seed=2))
        assert again.chunks[0].num_cached_tokens == 0


async def test_an_aborted_prompt_leaves_what_it_had_fed() -> None:
    executor = make_executor(buckets=(1, 2, 4, 8), logit_rows=8, step_s=0.002)
    prompt = tuple(range(2, 40))
    async with serving(executor) as engine:
        stream = engine.generate(make_request("gone", prompt))
        task = asyncio.ensure_future(anext(stream))
        await until(lambda: len(executor.plans) >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        request = make_request("next", prompt)
        check_ordinary(await collect(engine, request), request, executor.max_model_len)
        assert engine.failure is None


async def test_a_change_of_policy_forgets_every_prefix() -> None:
    executor = make_executor()
    async with serving(executor) as engine:
        await collect(engine, make_request("a", PROMPT))
        await until(lambda: engine._intake._is_asleep)
        engine.change_policy(engine._policy)
        outcome = await collect(engine, make_request("b", PROMPT))
    assert outcome.chunks[0].num_cached_tokens == 0
