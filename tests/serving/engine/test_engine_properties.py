"""Random traffic through the real step loop: every stream is what ordinary decoding gives, and nothing leaks."""

from __future__ import annotations

import asyncio
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import Request
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.fake_model import VOCAB_SIZE, ordinary_output
from tests.serving.engine.harness import (
    ForcedBudget,
    check_ordinary,
    collect,
    make_request,
    sample,
    serving,
)

BUDGETS = {
    "none": lambda rng: lambda largest: 0,
    "random": lambda rng: lambda largest: rng.randint(0, largest),
    "full": lambda rng: lambda largest: largest,
}


@st.composite
def executors(draw: st.DrawFn) -> FakeExecutor:
    """Small machines, often with too few pages for all slots and steps too small for all drafts."""
    max_model_len = draw(st.sampled_from([24, 40]))
    page_size = draw(st.sampled_from([1, 4, 8]))
    pages_of_one = -(-max_model_len // page_size)
    num_slots = draw(st.integers(1, 5))
    draft_len = draw(st.sampled_from([0, 1, 3]))
    largest = draw(st.sampled_from([8, 16, 32]))
    buckets = tuple(b for b in (1, 2, 4, 8, 16, 32) if b <= largest)
    return FakeExecutor(
        num_slots=num_slots,
        draft_len=draft_len,
        buckets=buckets,
        num_snapshots=draw(st.sampled_from([0, 1, 5])),
        page_size=page_size,
        num_pages=draw(st.integers(pages_of_one, 3 * pages_of_one)),
        max_model_len=max_model_len,
        logit_rows=draw(st.integers(max(num_slots, draft_len + 1, 2), largest)),
        agreement=draw(st.sampled_from([0.0, 0.6, 1.0])),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def requests(draw: st.DrawFn, max_model_len: int) -> list[Request]:
    count = draw(st.integers(1, 10))
    made = []
    # Prompts are unrelated, or begin alike and part somewhere.
    parting = draw(st.sampled_from([0, 9, max_model_len]))
    shared = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(parting)]
    for i in range(count):
        num_prompt = draw(st.integers(1, max_model_len - 1))
        rng = random.Random(draw(st.integers(0, 2**16)))
        own = (rng.randrange(VOCAB_SIZE) for _ in range(num_prompt))
        made.append(
            make_request(
                f"r{i}",
                (*shared, *own)[:num_prompt],
                max_tokens=draw(st.integers(1, 30)),
                min_tokens=draw(st.sampled_from([0, 0, 5])),
                seed=rng.getrandbits(64),
                ignore_eos=draw(st.booleans()),
                stop_token_ids=draw(st.sampled_from([(), (3,), (3, 4)])),
                logprobs=draw(st.sampled_from([None, None, 2])),
                prompt_logprobs=draw(st.sampled_from([None, None, 1])),
                presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
            )
        )
    return made


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic(data: st.DataObject) -> None:
    executor = data.draw(executors())
    traffic = data.draw(requests(executor.max_model_len))
    choose = BUDGETS[data.draw(st.sampled_from(sorted(BUDGETS)))]
    skips = data.draw(st.booleans())
    rng = random.Random(data.draw(st.integers(0, 2**16)))
    leaves_early = [data.draw(st.booleans()) for _ in traffic]
    asyncio.run(_run(executor, traffic, leaves_early, choose(rng), skips, rng))


async def _run(executor, traffic, leaves_early, choose, skips, rng) -> None:
    policy = None
    if executor.draft_len:
        drafts = (lambda: rng.random() > 0.2) if skips else (lambda: True)
        policy = ForcedBudget(executor.draft_len, choose, drafts)
    metrics = Metrics("fake")

    async def arrive(request: Request, leaves: bool) -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0.0005)
        stop_after = rng.randint(1, 5) if leaves else None
        outcome = await collect(engine, request, stop_after=stop_after)
        if outcome.finish_reason is None:
            tokens, _ = ordinary_output(request, executor.max_model_len)
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            check_ordinary(outcome, request, executor.max_model_len)

    async with serving(executor, policy, metrics=metrics) as engine:
        await asyncio.gather(*(arrive(*pair) for pair in zip(traffic, leaves_early)))
        await asyncio.to_thread(engine.shutdown)
        assert engine.is_healthy, engine.failure

    assert executor.in_flight == []
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert sample(metrics.registry, f"vllm:{name}") == 0
