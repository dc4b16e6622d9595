"""Prompts that begin alike: the time of a first token with cached prefixes and without, and whether texts agree.

python -m benchmarks.prefix_caching --output benchmarks/results/prefix_caching.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from benchmarks.prompts import held_out_passages, load_tokenizer
from benchmarks.result import Result
from benchmarks.server import Server, SpeculativeOptions, run_benchmark, serving


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(SpeculativeOptions):
    """Prompts that begin alike: the time of a first token with cached prefixes and without."""

    prefix_len: tuple[int, ...] = (512, 1024, 2048, 3500)
    """Tokens that the prompts of a group share."""
    question_len: int = 64
    """Tokens of each prompt behind them."""
    num_questions: int = 8
    """Prompts per group, sent one after the other."""
    num_tokens: int = 32
    """Greedy tokens of each that are compared."""
    min_gain: float = 2.0
    """Promised from the third prompt on: time without over time with cached prefixes."""


@dataclass(frozen=True)
class Asked:
    """A prompt's answer: milliseconds until its first token, tokens that were cached, and the text."""

    first_token_ms: float
    num_cached: int
    text: str


async def ask(server: Server, prompt: Sequence[int], num_tokens: int) -> Asked:
    """One token, timed, then the whole text."""
    start_s = time.perf_counter()
    first = await server.complete(prompt, max_tokens=1, temperature=0)
    first_token_ms = 1e3 * (time.perf_counter() - start_s)
    details: dict[str, Any] = first.response["usage"].get("prompt_tokens_details") or {}
    whole = await server.complete(prompt, max_tokens=num_tokens, temperature=0)
    return Asked(first_token_ms, details.get("cached_tokens", 0), whole.text)


async def ask_all(
    options: PrefixOptions, groups: Sequence[Sequence[list[int]]], flag: str
) -> list[list[Asked]]:
    """Every prompt of every group in order, from a server with this flag."""
    async with serving(options, options.speculation, flag) as server:
        await server.complete("warm up", max_tokens=1)
        return [[await ask(server, p, options.num_tokens) for p in group] for group in groups]


async def measure(options: PrefixOptions) -> int:
    """The same prompts to a server that caches prefixes and to one that does not; the exit status."""
    tokenizer = load_tokenizer(options.model_folder)
    groups = []
    for number, length in enumerate(options.prefix_len):
        passages = held_out_passages(tokenizer, 1 + options.num_questions, length)
        prefix = passages.pop(number)  # another one in every group
        groups.append([prefix + question[: options.question_len] for question in passages])
    cached = await ask_all(options, groups, "--enable-prefix-caching")
    fed = await ask_all(options, groups, "--no-enable-prefix-caching")
    rows: list[dict[str, Any]] = []
    num_equal = 0
    for length, with_cache, without in zip(options.prefix_len, cached, fed):
        num_equal += sum(a.text == b.text for a, b in zip(with_cache, without))
        for name, part in (("1", slice(0, 1)), ("2", slice(1, 2)), ("3 on", slice(2, None))):
            ours, plain = (
                statistics.median(asked.first_token_ms for asked in group[part])
                for group in (with_cache, without)
            )
            rows.append(
                {
                    "shared tokens": length,
                    "prompt": name,
                    "cached tokens": with_cache[part][0].num_cached,
                    "cached, ms": ours,
                    "fed, ms": plain,
                    "fed / cached": plain / ours,
                }
            )
    num_prompts = len(groups) * options.num_questions
    late = [row["fed / cached"] for row in rows if row["prompt"] == "3 on"]
    return Result(
        name="prefix_caching",
        promise=(
            f"the third prompt that begins alike has its first token in 1/{options.min_gain:g} of the time, "
            "and texts stay the same"
        ),
        is_kept=min(late) >= options.min_gain and num_equal == num_prompts,
        rows=rows,
        notes=(f"{num_equal} of {num_prompts} texts of {options.num_tokens} tokens are equal.",),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(measure(tyro.cli(PrefixOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
