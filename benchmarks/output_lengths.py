"""Speculation does not change how long answers are: Kolmogorov-Smirnov test at temperature 1.

    python -m benchmarks.output_lengths --output benchmarks/results/output_lengths.json

Answers to held-out chat questions end where the model ends them. Every arm has its own seeds, so the samples are
independent; lengths are integers, which makes the test's p-values a little too large, never too small.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tyro
from scipy import stats

from benchmarks.prompts import bundled_prompts
from benchmarks.result import Result
from benchmarks.server import ADAPTIVE, FIXED, Answer, Options, run_all, run_benchmark, serving
from dspark_jax.serving.bench.server_metrics import server_side_metrics

_ARMS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "fixed": FIXED,
    "adaptive": ADAPTIVE,
}
_MIN_ENDED = 0.5


@dataclass(frozen=True, kw_only=True)
class LengthOptions(Options):
    """Speculation does not change how long answers are: Kolmogorov-Smirnov test."""

    num_prompts: int = 50
    """Chat questions."""
    samples_per_prompt: int = 8
    """Answers to each, in every arm."""
    max_tokens: int = 384
    """Where an answer is cut that has not ended."""
    concurrency: int = 32
    """Requests in flight."""
    min_p: float = 0.01
    """Smaller p-values break the promise."""
    seed: int = 0
    """Of the first answer; arms and answers count on from it."""


async def sample(
    options: LengthOptions, arm: int, config: Mapping[str, Any] | None
) -> tuple[list[Answer], float | None]:
    """All answers of an arm, and the accepted length of its drafts."""
    prompts = bundled_prompts(options.num_prompts, "chat") * options.samples_per_prompt
    first_seed = options.seed + arm * len(prompts)
    async with serving(options, config) as server:
        before = await server.metrics()
        jobs = [
            partial(
                server.chat,
                prompt,
                max_tokens=options.max_tokens,
                temperature=1,
                seed=first_seed + i,
            )
            for i, prompt in enumerate(prompts)
        ]
        answers = await run_all(jobs, options.concurrency, [*_ARMS][arm])
        counts = server_side_metrics(before, await server.metrics())
    return answers, counts.get("spec_decode_acceptance_length")


async def compare(options: LengthOptions) -> int:
    """Sample every arm, test each against the first; the exit status."""
    lengths: dict[str, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for arm, (name, config) in enumerate(_ARMS.items()):
        answers, accepted_len = await sample(options, arm, config)
        lengths[name] = np.array([answer.num_tokens for answer in answers])
        reasons = Counter(answer.finish_reason for answer in answers)
        distance = p = None
        if name != "none":
            distance, p = map(float, stats.ks_2samp(lengths["none"], lengths[name]))
        rows.append(
            {
                "server": name,
                "samples": len(answers),
                "ended by the model": reasons["stop"] / len(answers),
                "mean tokens": float(lengths[name].mean()),
                "quartiles": " / ".join(
                    f"{q:g}" for q in np.percentile(lengths[name], (25, 50, 75))
                ),
                "accepted length": accepted_len,
                "KS distance to none": distance,
                "p": p,
            }
        )
    # Answers that are all cut at the same length would agree whatever the sampler does.
    is_telling = all(row["ended by the model"] >= _MIN_ENDED for row in rows)
    return Result(
        name="output_lengths",
        promise=f"output lengths at T=1 do not depend on speculation (KS test, p >= {options.min_p:g})",
        is_kept=is_telling and all(row["p"] is None or row["p"] >= options.min_p for row in rows),
        rows=rows,
        notes=()
        if is_telling
        else (f"Fewer than {_MIN_ENDED:.0%} ended: --max-tokens is too low.",),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(compare(tyro.cli(LengthOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
