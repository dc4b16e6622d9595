"""Many requests of random lengths at once, some abandoned, some bad: is one lost, wrong, or left behind?

    python -m benchmarks.soak --output benchmarks/results/soak.json

Every answer is compared with the answer that its prompt got when the server had nothing else to do. Requests are
greedy; their length is random, so the shorter text must be the beginning of the longer one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import tyro

from benchmarks.prompts import bundled_prompts
from benchmarks.result import Result, first_difference
from benchmarks.server import (
    Answer,
    Server,
    SpeculativeOptions,
    json_bytes,
    read_answer,
    run_all,
    run_benchmark,
    serving,
)

_BAD_BODIES = {
    b'{"prompt": "def f(': 400,  # broken JSON
    json_bytes(prompt="x", temperature=-1): 400,
    json_bytes(prompt="x", max_tokens="many"): 400,
    json_bytes(prompt="x", no_such_field=1): 400,
    json_bytes(prompt="x", max_tokens=10**6): 400,
    json_bytes(prompt=[10**6]): 400,
    json_bytes(prompt="x", model="no-such-model"): 404,
}
_IDLE_TIMEOUT_S = 30.0
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

Kind = Literal["whole", "abandoned", "bad"]
Outcome = Literal["right", "wrong", "lost", "abandoned", "ended early", "refused"]


@dataclass(frozen=True, kw_only=True)
class SoakOptions(SpeculativeOptions):
    """Soak test: many requests, some abandoned, some bad."""

    num_requests: int = 1000
    """Requests of the measured phase."""
    num_warm_requests: int = 200
    """Requests before memory is read for the first time."""
    concurrency: int = 64
    """Requests in flight."""
    num_prompts: int = 50
    """Different prompts; each is answered alone first."""
    max_tokens: int = 128
    """Longest answer; lengths are uniform over 1 to this."""
    abandoned_share: float = 0.1
    """Share of requests whose client hangs up while they run."""
    bad_share: float = 0.02
    """Share of requests that must be refused."""
    max_hang_up_s: float = 1.0
    """Clients hang up at a random time within this many seconds."""
    max_growth_mib: float = 32.0
    """Growth of resident memory over the measured phase that counts as flat."""
    seed: int = 0
    """Of prompts, lengths, hang-ups."""


@dataclass(frozen=True)
class Job:
    """One request to be made; `hang_up_s` and `body` where its kind has them."""

    kind: Kind
    prompt: str = ""
    max_tokens: int = 0
    hang_up_s: float = 0.0
    body: bytes = b""


def draw_jobs(options: SoakOptions, prompts: Sequence[str], count: int, seed: int) -> list[Job]:
    """Random requests."""
    rng = random.Random(seed)
    kinds: tuple[Kind, ...] = ("abandoned", "bad", "whole")
    shares = (options.abandoned_share, options.bad_share)
    return [
        Job(
            kind=rng.choices(kinds, (*shares, 1 - sum(shares)))[0],
            prompt=rng.choice(prompts),
            max_tokens=rng.randint(1, options.max_tokens),
            hang_up_s=rng.uniform(0, options.max_hang_up_s),
            body=rng.choice(list(_BAD_BODIES)),
        )
        for _ in range(count)
    ]


async def run_job(server: Server, job: Job, alone: Mapping[str, Answer]) -> Outcome:
    """Make one request and judge what came of it; prints what is wrong."""
    body = json_bytes(prompt=job.prompt, max_tokens=job.max_tokens, temperature=0)
    request = server.post("/v1/completions", job.body if job.kind == "bad" else body)
    try:
        async with asyncio.timeout(job.hang_up_s if job.kind == "abandoned" else None):
            status, reply = await request
    except OSError as error:
        if job.kind == "abandoned" and isinstance(error, TimeoutError):
            return "abandoned"
        return _complain("lost", f"{job}: {error}")
    if job.kind == "bad":
        if status == _BAD_BODIES[job.body] and json.loads(reply)["error"]["message"]:
            return "refused"
        return _complain("wrong", f"{job}: HTTP {status} {reply!r}")
    if status != 200:
        return _complain("lost", f"{job}: HTTP {status} {reply!r}")
    problem = difference(read_answer(status, reply), alone[job.prompt], job.max_tokens)
    if problem:
        return _complain("wrong", f"{job}: {problem}")
    return "right" if job.kind == "whole" else "ended early"


def difference(answer: Answer, alone: Answer, max_tokens: int) -> str:
    """Why `answer` is not the first `max_tokens` tokens of `alone`; empty if it is."""
    is_cut = max_tokens < alone.num_tokens
    expected_len = max_tokens if is_cut else alone.num_tokens
    expected_reason = "length" if is_cut else alone.finish_reason
    if (answer.num_tokens, answer.finish_reason) != (expected_len, expected_reason):
        return (
            f"{answer.num_tokens} tokens, {answer.finish_reason}; "
            f"expected {expected_len}, {expected_reason}"
        )
    # A cut may split a character, whose bytes then read as U+FFFD.
    text = answer.text.rstrip("\ufffd") if is_cut else answer.text
    at = first_difference(text, alone.text[: len(text)] if is_cut else alone.text)
    if at is None:
        return ""
    return f"differs at character {at}: {text[at:][:40]!r}, alone {alone.text[at:][:40]!r}"


def _complain(outcome: Outcome, text: str) -> Outcome:
    print(f"{outcome}: {text}", file=sys.stderr, flush=True)
    return outcome


async def idle_gauges(server: Server) -> dict[str, float]:
    """Running and waiting requests and cache usage, once they are zero or after a while."""
    deadline_s = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
    while True:
        totals = (await server.metrics()).totals
        gauges = {name: totals[name] for name in _GAUGES}
        if not any(gauges.values()) or asyncio.get_running_loop().time() > deadline_s:
            return gauges
        await asyncio.sleep(0.5)


async def soak(options: SoakOptions) -> int:
    """Warm up, run, count; the exit status."""
    prompts = bundled_prompts(options.num_prompts)
    async with serving(options, options.speculation) as server:
        ask = partial(server.complete, max_tokens=options.max_tokens, temperature=0)
        answers = await run_all([partial(ask, prompt) for prompt in prompts], 1, "alone")
        alone = dict(zip(prompts, answers))

        async def run(count: int, seed: int, title: str) -> Counter[Outcome]:
            jobs = draw_jobs(options, prompts, count, seed)
            return Counter(
                await run_all(
                    [partial(run_job, server, job, alone) for job in jobs],
                    options.concurrency,
                    title,
                )
            )

        outcomes = await run(options.num_warm_requests, options.seed + 1, "warm")
        rss_before_mib = server.rss_mib()
        outcomes += await run(options.num_requests, options.seed, "soak")
        gauges = await idle_gauges(server)
        rss_after_mib = server.rss_mib()
        is_alive = server.process.returncode is None
    growth_mib = rss_after_mib - rss_before_mib
    is_kept = (
        not outcomes["lost"]
        and not outcomes["wrong"]
        and growth_mib <= options.max_growth_mib
        and not any(gauges.values())
        and is_alive
    )
    rows = [{"finding": f"requests {name}", "count": outcomes[name]} for name in get_args(Outcome)]
    rows += [{"finding": f"{name} at the end", "count": gauges[name]} for name in _GAUGES]
    rows += [
        {"finding": "resident memory after warming up, MiB", "count": rss_before_mib},
        {"finding": "resident memory at the end, MiB", "count": rss_after_mib},
        {"finding": "growth, MiB", "count": growth_mib},
        {"finding": "server still the same process", "count": is_alive},
    ]
    return Result(
        name="soak",
        promise=(
            f"of {options.num_requests} requests at concurrency {options.concurrency} none is lost, "
            "none wrong, memory stays flat and all slots are free at the end"
        ),
        is_kept=is_kept,
        rows=rows,
        notes=("Requests of the warm-up are counted too.",),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(soak(tyro.cli(SoakOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
