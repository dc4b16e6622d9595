"""Order, concurrency, arrival times and interruption of a run."""

import asyncio
import time

import numpy as np
import pytest

from dspark_jax.serving.bench.client import CompletionClient
from dspark_jax.serving.bench.dataset import Prompt
from dspark_jax.serving.bench.http import ConnectionPool
from dspark_jax.serving.bench.load import arrival_times, run_load, wait_until_ready, warm_up

from .fake_server import FakeServer


def _client(server: FakeServer) -> CompletionClient:
    return CompletionClient(
        pool=ConnectionPool(server.url), backend="openai", endpoint="/v1/completions", model="m"
    )


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}", 10) for i in range(count)]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_spread(burstiness):
    times = arrival_times(20_000, request_rate=50.0, burstiness=burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(20_000 / 50.0)
    assert (gaps >= 0).all()
    # A gamma distribution of shape b has a coefficient of variation of 1 / sqrt(b).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_arrivals_at_the_limits():
    assert not arrival_times(5, float("inf"), 1.0, seed=0).any()
    np.testing.assert_allclose(arrival_times(4, 2.0, float("inf"), seed=0), [0.5, 1.0, 1.5, 2.0])


def test_arrivals_follow_the_seed():
    first, again, other = (arrival_times(9, 5.0, 1.0, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("limit", [1, 4])
async def test_prompts_go_out_in_order_and_within_the_limit(limit):
    async with FakeServer(chunk_delay_s=0.002) as server:
        client = _client(server)
        result = await run_load(client, _prompts(12), max_concurrency=limit)
        client.pool.close()
    assert [body["prompt"] for body in server.bodies] == [f"prompt {i}" for i in range(12)]
    assert server.max_in_flight == limit
    assert server.num_connections == limit
    assert [record.error for record in result.records] == [""] * 12
    assert result.num_unfinished == 0
    starts = [record.start_s for record in result.records]
    assert starts == sorted(starts)


async def test_nothing_is_sent_before_its_time():
    send_times_s = np.array([0.0, 0.1, 0.25])
    async with FakeServer() as server:
        client = _client(server)
        before_s = time.perf_counter()
        result = await run_load(client, _prompts(3), send_times_s=send_times_s)
        client.pool.close()
    assert ([record.start_s for record in result.records] >= before_s + send_times_s).all()
    assert result.duration_s >= 0.25


async def test_stop_keeps_what_is_done_and_counts_the_rest():
    async with FakeServer() as server:
        client = _client(server)
        stop = asyncio.Event()
        prompts = [Prompt("ok", 10), Prompt("stall", 10), Prompt("ok", 10), Prompt("ok", 10)]

        async def stop_later() -> None:
            while len(server.bodies) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            stop.set()

        stopping = asyncio.create_task(stop_later())
        result = await run_load(client, prompts, max_concurrency=1, stop=stop)
        await stopping
    assert len(result.records) == 1
    assert result.records[0].output_tokens == 10
    assert result.num_unfinished == 3
    assert len(server.bodies) == 2


async def test_warm_up_refuses_a_failing_server():
    async with FakeServer() as server:
        client = _client(server)
        await warm_up(client, _prompts(3), 2)
        with pytest.raises(RuntimeError, match="warm-up request failed: HTTP 400"):
            await warm_up(client, [Prompt("http 400", 1)], 1)
        client.pool.close()


async def test_readiness_times_out_with_the_last_reason():
    async with FakeServer() as server:
        client = _client(server)
        await wait_until_ready(client, Prompt("ok", 1), timeout_s=5.0)
        with pytest.raises(RuntimeError, match="not ready after 0 s: HTTP 400"):
            await wait_until_ready(client, Prompt("http 400", 1), timeout_s=0.0)
        client.pool.close()
