"""Acceptance of drafts against the length of the prompt.

    python -m benchmarks.prompt_length --output benchmarks/results/prompt_length.json

Passages come from held-out files of this interpreter's own library. A prompt of length L is the last L tokens of
its passage: what follows is the same text at every length, only how much came before differs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tyro

from benchmarks.prompts import held_out_passages, load_tokenizer
from benchmarks.result import Result
from benchmarks.server import FIXED, SpeculativeOptions, run_all, run_benchmark, serving
from dspark_jax.config import load_config
from dspark_jax.serving.bench.server_metrics import server_side_metrics


@dataclass(frozen=True, kw_only=True)
class PromptLengthOptions(SpeculativeOptions):
    """Acceptance of drafts against the length of the prompt."""

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 3500)
    """Prompt lengths in tokens, the first one is what the others are compared with."""
    num_passages: int = 128
    """Prompts of each length."""
    num_tokens: int = 128
    """Tokens generated for each."""
    temperature: float = 1.0
    """Sampling temperature."""
    concurrency: int = 16
    """Requests in flight."""
    tolerance: float = 0.05
    """Share of the accepted length that may be lost against the shortest prompts."""
    speculative_config: str | None = json.dumps(FIXED)
    """The server's flag."""


async def measure(options: PromptLengthOptions) -> int:
    """Generate at every length, compare with the shortest; the exit status."""
    bos = load_config(options.model_folder).bos_token_id
    tokenizer = load_tokenizer(options.model_folder)
    passages = held_out_passages(tokenizer, options.num_passages, max(options.lengths))
    rows: list[dict[str, Any]] = []
    # Accepted lengths and nats per token by passage, for each prompt length.
    measured: list[tuple[np.ndarray, np.ndarray]] = []
    async with serving(options, options.speculation, "--per-request-spec-decode-metrics") as server:
        for length in options.lengths:
            before = await server.metrics()
            jobs = [
                partial(
                    server.complete,
                    [bos, *passage[len(passage) - length + 1 :]],
                    max_tokens=options.num_tokens,
                    temperature=options.temperature,
                    seed=seed,
                    ignore_eos=True,
                    logprobs=0,
                )
                for seed, passage in enumerate(passages)
            ]
            answers = await run_all(jobs, options.concurrency, f"{length} tokens")
            counts = server_side_metrics(before, await server.metrics())
            stats = [answer.response["metrics"]["speculative_decoding"] for answer in answers]
            # Per passage, because the same passages come at every length.
            accepted_lens = np.array([s["mean_acceptance_length"] for s in stats])
            scores = [answer.response["choices"][0]["logprobs"] for answer in answers]
            nats = np.array([-np.mean(score["token_logprobs"]) for score in scores])
            measured.append((accepted_lens, nats))
            change = accepted_lens - measured[0][0]
            rates = counts["spec_decode_per_position_acceptance_rates"]
            rows.append(
                {
                    "prompt tokens": length,
                    "drafts": counts["spec_decode_num_drafts"],
                    "accepted length": counts["spec_decode_acceptance_length"],
                    "change per passage": float(change.mean()),
                    "its standard error": float(change.std(ddof=1) / len(change) ** 0.5),
                    "target's nats per token": float(nats.mean()),
                    "change that goes with them": 0.0,
                    **{f"position {i}": rate for i, rate in enumerate(rates, 1)},
                }
            )
    slope = _slope(measured)
    for row, (_, nats) in zip(rows, measured):
        row["change that goes with them"] = slope * float(nats.mean() - measured[0][1].mean())
    floor = (1 - options.tolerance) * rows[0]["accepted length"]
    return Result(
        name="prompt_length",
        promise=(
            "the accepted length does not fall with the length of the prompt "
            f"(by more than {options.tolerance:.0%})"
        ),
        is_kept=all(row["accepted length"] >= floor for row in rows),
        rows=rows,
        notes=(
            "Positions: share of drafts whose token there, and all before it, was accepted.",
            "Nats: how uncertain the target itself is of what it writes; the more, the less is accepted: "
            f"{slope:+.2f} per nat, over the texts of one prompt length.",
        ),
        options=options,
    ).finish(options.output)


def _slope(measured: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Accepted length per nat by least squares, each prompt length about its own means."""
    centred = [(a - a.mean(), n - n.mean()) for a, n in measured]
    covariance = sum(float(a @ n) for a, n in centred)
    return covariance / sum(float(n @ n) for _, n in centred)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(measure(tyro.cli(PromptLengthOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
