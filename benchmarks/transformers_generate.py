"""Tokens per second on the CPU beside `generate` of Hugging Face transformers, on the same weights.

    python -m benchmarks.transformers_generate --output benchmarks/results/transformers_generate.json

Both get the same token ids, all prompts of one length so that transformers needs no padding, make the same number
of greedy tokens in float32, and take turns. Ours is the whole server with HTTP; it idles while the other runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro

from benchmarks.prompts import held_out_passages, load_tokenizer
from benchmarks.result import Result
from benchmarks.server import Answer, Server, SpeculativeOptions, run_all, run_benchmark, serving
from tests.parity.hf import hf_model
from torch_ref.checkpoint import load_checkpoint

Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(SpeculativeOptions):
    """Tokens per second on the CPU beside `generate` of Hugging Face transformers."""

    num_prompts: int = 16
    """Prompts of a round, at every batch size."""
    prompt_len: int = 64
    """Tokens of every prompt."""
    num_tokens: int = 64
    """Tokens to generate for every prompt."""
    batches: tuple[int, ...] = (1, 16)
    """Batch sizes of transformers, and numbers of requests in flight of the server."""
    rounds: int = 3
    """Measurements of each; the median counts."""
    min_speedup: float = 3.0
    """Ratio that is promised at every batch size."""


def generate(model: Any, prompts: Sequence[Ids], num_tokens: int, batch: int) -> list[Ids]:
    """Greedy tokens of every prompt by a transformers `model`, `batch` prompts at a time."""
    answers = []
    for first in range(0, len(prompts), batch):
        token_ids = torch.tensor(prompts[first : first + batch])
        with torch.inference_mode():
            whole = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        answers += whole[:, token_ids.shape[1] :].tolist()
    return answers


async def ask(
    server: Server, prompts: Sequence[Ids], num_tokens: int, batch: int, **fields: Any
) -> list[Answer]:
    """Greedy answers to every prompt by the server, `batch` requests in flight."""
    job = partial(server.complete, max_tokens=num_tokens, temperature=0, ignore_eos=True, **fields)
    return await run_all([partial(job, prompt) for prompt in prompts], batch, f"server, {batch}")


async def compare(options: SpeedOptions) -> int:
    """Warm both up, let them take turns, compare; the exit status."""
    cfg, weights = load_checkpoint(options.model_folder)
    trunk = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    model = hf_model(trunk, cfg)
    model.generation_config.eos_token_id = None  # no token ends the text, as with ignore_eos
    tokenizer = load_tokenizer(options.model_folder)
    prompts = held_out_passages(tokenizer, options.num_prompts, options.prompt_len)
    num_made = options.num_prompts * options.num_tokens
    rates: dict[tuple[str, int], list[float]] = {}
    async with serving(options, options.speculation, "--dtype", "float32") as server:
        largest = max(options.batches)
        ours = await ask(server, prompts, options.num_tokens, largest, logprobs=0)
        theirs = generate(model, prompts, options.num_tokens, largest)
        num_equal = sum(
            answer.tokens == [tokenizer.token_text(i) for i in token_ids]
            for answer, token_ids in zip(ours, theirs)
        )
        for _ in range(options.rounds):
            for batch in options.batches:
                start_s = time.perf_counter()
                await ask(server, prompts, options.num_tokens, batch)
                between_s = time.perf_counter()
                generate(model, prompts, options.num_tokens, batch)
                end_s = time.perf_counter()
                rates.setdefault(("ours", batch), []).append(num_made / (between_s - start_s))
                rates.setdefault(("theirs", batch), []).append(num_made / (end_s - between_s))
    rows = []
    for batch in options.batches:
        our_rate, their_rate = (
            statistics.median(rates[side, batch]) for side in ("ours", "theirs")
        )
        rows.append(
            {
                "batch": batch,
                "server, tokens/s": our_rate,
                "transformers, tokens/s": their_rate,
                "ratio": our_rate / their_rate,
                "lowest ratio of a round": min(
                    a / b for a, b in zip(rates["ours", batch], rates["theirs", batch])
                ),
            }
        )
    return Result(
        name="transformers_generate",
        promise=f"at least {options.min_speedup:g} times the tokens per second of transformers",
        is_kept=all(row["ratio"] >= options.min_speedup for row in rows),
        rows=rows,
        notes=(
            f"{num_equal} of {len(prompts)} texts of {options.num_tokens} tokens are the same; "
            f"torch uses {torch.get_num_threads()} threads.",
        ),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(compare(tyro.cli(SpeedOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
