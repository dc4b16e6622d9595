"""Speculation changes no byte: greedy text, and sampled text under coupled verification.

    python -m benchmarks.lossless --output benchmarks/results/lossless.json

A server without speculation answers every prompt, one at a time; that is the reference. Every other server, at
every concurrency, must give the same text, token count and reason to end. For an answer that differs, `near_ties`
says how close the closest choice of experts or entries was where the log-probabilities part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tyro

from benchmarks.near_ties import closest_choice
from benchmarks.prompts import bundled_prompts, load_tokenizer
from benchmarks.result import Result, first_difference
from benchmarks.server import (
    ADAPTIVE,
    COUPLED,
    FIXED,
    Answer,
    Options,
    Server,
    run_all,
    run_benchmark,
    serving,
)
from dspark_jax.config import load_config
from dspark_jax.serving.bench.server_metrics import server_side_metrics

GREEDY, SEEDED = "greedy", "T=1 with seeds"
# Name → speculative config, and the ways of choosing tokens that it must not change.
_ARMS: Mapping[str, tuple[Mapping[str, Any] | None, tuple[str, ...]]] = {
    "none": (None, (GREEDY, SEEDED)),
    "fixed": (FIXED, (GREEDY,)),
    "adaptive": (ADAPTIVE, (GREEDY,)),
    "fixed, coupled": ({**FIXED, **COUPLED}, (SEEDED,)),
    "adaptive, coupled": ({**ADAPTIVE, **COUPLED}, (SEEDED,)),
}
_CONTEXT = 30
# Programs of different size differ by some 1e-6 in log-probabilities.
_PARTED = 1e-4


@dataclass(frozen=True, kw_only=True)
class LosslessOptions(Options):
    """Speculation changes no byte: greedy text, and sampled text under coupled verification."""

    num_prompts: int = 100
    """Prompts."""
    num_tokens: int = 128
    """Longest answer, in tokens."""
    concurrency: tuple[int, ...] = (1, 7, 32)
    """Requests in flight."""
    arms: tuple[str, ...] = tuple(_ARMS)
    """Which servers to compare. `none` is the reference in any case; named here, it is compared with itself."""


def describe_difference(answer: Answer, reference: Answer) -> str:
    """Where two answers differ, with the text around it; empty if they are the same."""
    if answer == reference:
        return ""
    at = first_difference(answer.text, reference.text)
    if at is None:
        return (
            f"same text, but {answer.num_tokens} tokens and {answer.finish_reason}, "
            f"expected {reference.num_tokens} and {reference.finish_reason}"
        )
    ours, theirs = answer.text[at : at + _CONTEXT], reference.text[at : at + _CONTEXT]
    return f"differs at character {at}: {ours!r}, expected {theirs!r}"


def explain_difference(
    options: LosslessOptions, prompt: str, answer: Answer, reference: Answer
) -> str:
    """Where the log-probabilities of two answers part, and the model's closest choice there."""
    ours, theirs = (a.response["choices"][0]["logprobs"] for a in (answer, reference))
    at = first_difference(ours["tokens"], theirs["tokens"])
    if at is None:
        return "all tokens are equal"
    pairs = zip(ours["token_logprobs"][:at], theirs["token_logprobs"])
    at = next((i for i, (a, b) in enumerate(pairs) if abs(a - b) > _PARTED), at)
    tokenizer = load_tokenizer(options.model_folder)
    vocab_size = load_config(options.model_folder).vocab_size
    ids = {tokenizer.token_text(i): i for i in range(vocab_size)}
    read = tokenizer.encode(prompt, add_special_tokens=True)
    read += [ids[text] for text in theirs["tokens"][:at]]
    closest = closest_choice(options.model_folder, read)
    return f"probabilities part at token {at}, where the closest choice is: {closest}"


async def ask(
    server: Server, options: LosslessOptions, prompts: Sequence[str], choice: str, concurrency: int
) -> list[Answer]:
    """Answers to all prompts. With seeds, prompt i has seed i."""

    def job(seed: int, prompt: str) -> Any:
        fields = {"temperature": 0} if choice == GREEDY else {"temperature": 1, "seed": seed}
        # With log-probabilities, to see where answers part.
        return server.complete(prompt, max_tokens=options.num_tokens, logprobs=0, **fields)

    jobs = [partial(job, seed, prompt) for seed, prompt in enumerate(prompts)]
    return await run_all(jobs, concurrency, f"{choice}, {concurrency} at a time")


async def compare(options: LosslessOptions) -> int:
    """Run all servers in turn; the exit status."""
    prompts = bundled_prompts(options.num_prompts)
    references: dict[str, list[Answer]] = {}
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in dict.fromkeys(("none", *options.arms)):
        config, choices = _ARMS[name]
        async with serving(options, config) as server:
            for choice in choices:
                if name == "none":
                    references[choice] = await ask(server, options, prompts, choice, 1)
                for concurrency in options.concurrency if name in options.arms else ():
                    before = await server.metrics()
                    answers = await ask(server, options, prompts, choice, concurrency)
                    counts = server_side_metrics(before, await server.metrics())
                    found = [describe_difference(a, b) for a, b in zip(answers, references[choice])]
                    for index, difference in enumerate(found):
                        if difference:
                            where = f"{name}, {choice}, concurrency {concurrency}, prompt {index}"
                            pair = answers[index], references[choice][index]
                            reason = explain_difference(options, prompts[index], *pair)
                            notes.append(f"{where}: {difference}; {reason}")
                            print(notes[-1], flush=True)
                    rows.append(
                        {
                            "server": name,
                            "tokens chosen": choice,
                            "concurrency": concurrency,
                            "answers": len(answers),
                            "tokens": sum(answer.num_tokens for answer in answers),
                            "accepted length": counts.get("spec_decode_acceptance_length"),
                            "different": sum(map(bool, found)),
                        }
                    )
    return Result(
        name="lossless",
        promise=(
            f"{options.num_prompts} prompts x {options.num_tokens} tokens: text with speculation is "
            "byte-identical to text without, greedy and with seeds, at every concurrency"
        ),
        is_kept=not any(row["different"] for row in rows),
        rows=rows,
        notes=notes,
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = tyro.cli(LosslessOptions, args=argv)
    if unknown := set(options.arms) - set(_ARMS):
        print(f"error: --arms {sorted(unknown)} not among {list(_ARMS)}", file=sys.stderr)
        return 2
    return run_benchmark(compare(options))


if __name__ == "__main__":
    sys.exit(main())
