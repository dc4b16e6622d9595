"""The bundled model behind a cached prefix says what it says when it is fed everything."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json.decoder
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.budget import BudgetPolicy, CostCurves, CostTable
from dspark_jax.serving.api.generation import Backend
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.executor import Executor
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.policy import (
    AdaptiveVerification,
    FixedVerification,
    PlainDecoding,
    VerificationPolicy,
)
from dspark_jax.serving.request import Request, SpeculationStats
from dspark_jax.serving.scheduler import Schedule
from dspark_jax.serving.tokenizer import TextTokenizer
from tests.serving.clients import openai_client
from tests.serving.engine.harness import Outcome, collect, make_request, sample, until

BUNDLED = Path(str(resources.files("dspark_jax") / "bundled"))
NUM_SLOTS, NUM_SNAPSHOTS, BUCKET = 4, 3, 32
PAGE = 64
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "seed": 11}
FLAGS = [
    "--dtype", "float32", "--max-num-seqs", str(NUM_SLOTS), "--max-model-len", "256",
    "--max-num-batched-tokens", str(BUCKET), "--compilation-config", '{"cudagraph_capture_sizes": [32]}',
    "--num-prefix-snapshots", str(NUM_SNAPSHOTS), "--speculative-config", '{"method": "dspark"}',
]  # fmt: skip


def adaptive(executor: Executor) -> VerificationPolicy:
    """Adaptive verification with step times that make it choose, and nothing that it learns between requests."""
    curves = CostCurves(
        context_len=128, verify={8: 1.0, 16: 1.6, BUCKET: 3.0}, draft={NUM_SLOTS: 0.2}
    )
    return AdaptiveVerification(
        num_slots=NUM_SLOTS,
        draft_len=executor.draft_len,
        cost=CostTable([curves], max_tokens=BUCKET, max_requests=NUM_SLOTS),
        objective=BudgetPolicy(),
        skipper=None,
    )


POLICIES = {
    "none": lambda executor: PlainDecoding(),
    "fixed": lambda executor: FixedVerification(executor.draft_len),
    "adaptive": adaptive,
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory) -> Executor:
    folder = tmp_path_factory.mktemp("programs")
    return Executor.from_config(parse_flags([*FLAGS, "--compilation-cache-dir", str(folder)]))


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Token ids of more text than any test needs."""
    tokenizer = TextTokenizer.from_folder(BUNDLED, bos_token_id=0)
    return list(tokenizer.encode(inspect.getsource(json.decoder), add_special_tokens=True))


@contextlib.asynccontextmanager
async def serving(
    executor: Executor, policy: str = "fixed", *, metrics: Metrics | None = None, **changes: int
) -> AsyncIterator[Engine]:
    """An engine whose caches and snapshots are NaN; `changes` make its executor claim less than it has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(executor, name, value)
        engine = Engine(
            executor,
            model_config=executor.model_config,
            metrics=metrics or Metrics("fake"),
            build_policy=POLICIES[policy],
        )
        engine.start()
        spoil(executor, set())
        try:
            yield engine
        finally:
            await asyncio.to_thread(engine.shutdown, drain=False)
        assert engine.failure is None


def spoil(executor: Executor, kept_pages: set[int], *, snapshots: bool = True) -> None:
    """NaN in every ring, in every page but those, and in the snapshots, while nothing runs."""
    jax.block_until_ready(executor.state)
    kept = np.isin(np.arange(executor.state.cache.csa_entries.shape[1]), sorted(kept_pages))

    def with_nan(name: str, array: Any) -> Any:
        if array is None:
            return None
        if name not in ("csa_entries", "index_keys", "hca_entries"):
            return jnp.full_like(array, jnp.nan)
        return jnp.where(kept.reshape(1, -1, 1, 1), array, jnp.nan)

    cache = executor.state.cache
    poisoned = {name: with_nan(name, array) for name, array in vars(cache).items()}
    executor.state = executor.state.replace(
        cache=cache.replace(**poisoned),
        draft_window=jnp.full_like(executor.state.draft_window, jnp.nan),
    )
    if snapshots:
        nan = lambda array: jnp.full_like(array, jnp.nan)
        executor._snapshots = jax.tree.map(nan, executor._snapshots)


def ask(request_id: str, prompt: list[int], **sampling: Any) -> Request:
    fields = GREEDY | {"max_tokens": 40, "ignore_eos": True} | sampling
    return make_request(request_id, tuple(prompt), **fields)


async def run_all(engine: Engine, requests: list[Request]) -> list[Outcome]:
    """All at once."""
    return list(await asyncio.gather(*(collect(engine, request) for request in requests)))


async def uncached(executor: Executor, requests: list[Request]) -> list[list[int]]:
    """The texts of a server without prefix caching."""
    async with serving(executor, num_snapshots=0) as engine:
        outcomes = await run_all(engine, requests)
    assert all(outcome.chunks[0].num_cached_tokens is None for outcome in outcomes)
    return [outcome.tokens for outcome in outcomes]


def cached_tokens(outcome: Outcome) -> int:
    count = outcome.chunks[0].num_cached_tokens
    assert count is not None
    return count


def cached_pages(engine: Engine) -> set[int]:
    return set(engine._scheduler.pages._by_page)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_a_hit_says_what_a_cold_run_says_and_accepts_as_much(
    executor: Executor, text: list[int], policy: str, sampling: dict[str, Any]
) -> None:
    """What it may read of the first request's leavings is its cached pages and the snapshot: the rest is NaN."""
    prompt = text[:150]
    stats: list[SpeculationStats | None] = []
    async with serving(executor, policy, num_snapshots=0) as engine:
        plain = await collect(engine, ask("plain", prompt, **sampling))
        stats.append(plain.last.speculation)
    async with serving(executor, policy) as engine:
        cold = await collect(engine, ask("cold", prompt, **sampling))
        await until(lambda: engine._intake._is_asleep)
        assert len(cached_pages(engine)) == 2
        spoil(executor, cached_pages(engine), snapshots=False)
        hit = await collect(engine, ask("hit", prompt, **sampling))
        stats += [cold.last.speculation, hit.last.speculation]
    assert (cached_tokens(cold), cached_tokens(hit)) == (0, 2 * PAGE)
    assert plain.tokens == cold.tokens == hit.tokens
    assert stats[0] == stats[1] == stats[2]
    assert (stats[0].num_accepted_tokens > 0) == (policy != "none")


async def test_turns_of_a_conversation_start_where_the_one_before_ended(
    executor: Executor, text: list[int]
) -> None:
    turns = [ask(f"t{n}", text[:n]) for n in (70, 130, 131, 200)]
    expected = await uncached(executor, turns)
    async with serving(executor) as engine:
        outcomes = [await collect(engine, turn) for turn in turns]
    assert [outcome.tokens for outcome in outcomes] == expected
    assert [cached_tokens(outcome) for outcome in outcomes] == [0, PAGE, 2 * PAGE, 2 * PAGE]


async def test_many_that_share_a_beginning_at_once_say_what_each_would_alone(
    executor: Executor, text: list[int]
) -> None:
    requests = [
        ask(f"r{i}", [*text[:140], *text[200 + 9 * i : 230 + 9 * i]], seed=i, temperature=t)
        for i, t in enumerate((0.0, 0.8, 0.0, 0.8, 0.0, 0.8, 0.0, 0.8))
    ]
    expected = await uncached(executor, requests)
    async with serving(executor) as engine:
        outcomes = await run_all(engine, requests)
        assert engine._scheduler.pages.num_free == executor.num_pages
    assert [outcome.tokens for outcome in outcomes] == expected
    assert sum(cached_tokens(outcome) == 2 * PAGE for outcome in outcomes) >= 4


async def test_texts_stay_right_when_pages_run_out(executor: Executor, text: list[int]) -> None:
    """Pages for little more than one request: those of finished ones are taken again, and the young give way."""
    metrics = Metrics("fake")
    prompts = [text[:100], text[300:430], text[:90], text[:160], text[310:400], text[300:440]]
    requests = [ask(f"r{i}", prompt, max_tokens=90) for i, prompt in enumerate(prompts * 2)]
    expected = await uncached(executor, requests)
    async with serving(executor, metrics=metrics, num_pages=7) as engine:
        outcomes = await run_all(engine, requests)
    assert [outcome.tokens for outcome in outcomes] == expected
    assert sample(metrics.registry, "vllm:num_preemptions_total") > 0
    assert sample(metrics.registry, "vllm:prefix_cache_hits_total") > 0


async def test_a_place_for_a_snapshot_is_used_again(executor: Executor, text: list[int]) -> None:
    prompts = [text[:100], text[100:200], text[:100], text[:100], text[100:200]]
    requests = [ask(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    expected = await uncached(executor, requests)
    async with serving(executor, num_snapshots=1) as engine:
        outcomes = [await collect(engine, request) for request in requests]
    assert [outcome.tokens for outcome in outcomes] == expected
    assert [cached_tokens(outcome) for outcome in outcomes] == [0, 0, 0, PAGE, 0]


async def test_a_scored_prompt_is_right_beside_cached_pages(
    executor: Executor, text: list[int]
) -> None:
    request = ask("r", text[:150], prompt_logprobs=1)
    async with serving(executor, num_snapshots=0) as engine:
        expected = await collect(engine, request)
    async with serving(executor) as engine:
        before, _ = await run_all(engine, [ask("before", text[:150]), request])
        again = await collect(engine, request)
        after = await collect(engine, ask("after", text[:150]))
    assert again.tokens == expected.tokens
    assert after.tokens == before.tokens
    assert (cached_tokens(again), cached_tokens(after)) == (0, 2 * PAGE)
    scores = [
        [entry and entry.logprob for entry in outcome.chunks[0].prompt_logprobs or ()][1:]
        for outcome in (again, expected)
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 1.0}, {"frequency_penalty": 0.6}, {"repetition_penalty": 1.3}],
    ids=lambda penalty: next(iter(penalty)),
)
async def test_penalties_know_the_tokens_that_were_skipped(
    executor: Executor, text: list[int], penalty: dict[str, Any]
) -> None:
    """In a slot where another request has left its own counts."""
    request = ask("r", text[:150], **penalty)
    async with serving(executor, num_snapshots=0) as engine:
        expected = await collect(engine, request)
        free = await collect(engine, ask("free", text[:150]))
    async with serving(executor) as engine:
        await collect(engine, ask("before", text[300:400], **penalty))
        cold = await collect(engine, request)
        hit = await collect(engine, request)
    assert free.tokens != expected.tokens == cold.tokens == hit.tokens
    assert (cached_tokens(cold), cached_tokens(hit)) == (0, 2 * PAGE)


async def test_penalties_of_a_preempted_request_know_its_output(
    executor: Executor, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back behind pages that hold the end of its prompt and the beginning of its output."""
    prompt = text[: PAGE - 2]
    request = ask("r", prompt, max_tokens=120, frequency_penalty=0.3)
    [expected] = await uncached(executor, [request])
    counted: list[int] = []
    set_counts = executor.set_counts

    def spy(slot: int, output: np.ndarray, prompt: np.ndarray) -> None:
        counted.append(int(output.sum()))
        set_counts(slot, output, prompt)

    async with serving(executor) as engine:
        await collect(engine, ask("same", [*prompt, *expected[: PAGE + 10]]))
        scheduler = engine._scheduler
        schedule = scheduler.schedule

        def preempting_once() -> Schedule:
            if not counted and any(len(s.output) > PAGE + 10 for s in scheduler._running):
                scheduler._preempt_youngest()
            return schedule()

        monkeypatch.setattr(executor, "set_counts", spy)
        monkeypatch.setattr(scheduler, "schedule", preempting_once)
        outcome = await collect(engine, request)
    assert outcome.tokens == expected
    assert counted == [PAGE + 2]


async def test_the_second_of_two_chats_with_one_system_prompt_reports_its_hit(
    executor: Executor, text: list[int]
) -> None:
    tokenizer = TextTokenizer.from_folder(BUNDLED, bos_token_id=0)
    system = {"role": "system", "content": "Answer as the source of a module would. " * 12}
    counts = []
    async with serving(executor) as engine:
        backend = Backend(
            engine=engine, tokenizer=tokenizer, metrics=Metrics("m"), model_name="bundled"
        )
        async with openai_client(backend) as client:
            for question in ("What is a list?", "And a tuple?", "And a set?"):
                reply = await client.chat.completions.create(
                    model="bundled",
                    messages=[system, {"role": "user", "content": question}],
                    max_tokens=4,
                )
                details = reply.usage.prompt_tokens_details
                assert reply.usage.prompt_tokens > PAGE
                counts.append(details.cached_tokens)
    assert counts[0] == 0
    assert counts[1] == counts[2] > 0
    assert counts[1] % PAGE == 0
