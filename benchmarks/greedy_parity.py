"""Greedy tokens of the busy server against the PyTorch reference without any cache.

    python -m benchmarks.greedy_parity --output benchmarks/results/greedy_parity.json

The server computes in float32, answers all prompts at once, in chunks, pages and shared steps; the reference runs
whole sequences anew for every token. They share the checkpoint files and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from benchmarks.prompts import bundled_prompts, load_tokenizer
from benchmarks.result import Result, first_difference
from benchmarks.server import SpeculativeOptions, run_all, run_benchmark, serving
from torch_ref.checkpoint import load_checkpoint
from torch_ref.config import TorchRefConfig
from torch_ref.model import forward


@dataclass(frozen=True, kw_only=True)
class ParityOptions(SpeculativeOptions):
    """Greedy tokens of the busy server against the PyTorch reference without any cache."""

    num_prompts: int = 20
    """Prompts."""
    max_prompt_len: int = 128
    """Longest prompt, in tokens."""
    num_tokens: int = 64
    """Tokens to generate for each prompt, whatever they are."""
    concurrency: int = 16
    """Requests in flight at the server."""
    reference_batch: int = 10
    """Prompts that the reference runs together, of similar length."""


@dataclass(frozen=True)
class Reference:
    """Greedy token ids of one prompt, and the gap of the two largest logits at each."""

    token_ids: list[int]
    gaps: list[float]


@torch.no_grad()
def greedy_without_cache(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    progress: tqdm,
) -> list[Reference]:
    """Run `prompts` together, padded at the end: what comes later cannot be seen."""
    lens = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    tokens = torch.zeros(len(prompts), int(lens.max()) + num_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    gaps = []
    for step in range(num_tokens):
        ends = lens + step
        logits = forward(weights, cfg, tokens[:, : int(ends.max())])[rows, ends - 1]
        best = logits.topk(2)
        tokens[rows, ends] = best.indices[:, 0]
        gaps.append(best.values[:, 0] - best.values[:, 1])
        progress.update(len(prompts))
    return [
        Reference(
            tokens[row, lens[row] : lens[row] + num_tokens].tolist(),
            [float(gap[row]) for gap in gaps],
        )
        for row in range(len(prompts))
    ]


def references(options: ParityOptions, prompts: Sequence[Sequence[int]]) -> list[Reference]:
    """The reference's answers in the order of the prompts."""
    cfg, weights = load_checkpoint(options.model_folder)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, Reference] = {}
    total = len(prompts) * options.num_tokens
    with tqdm(total=total, desc="reference", unit="token") as progress:
        for first in range(0, len(order), options.reference_batch):
            group = order[first : first + options.reference_batch]
            batch = [prompts[i] for i in group]
            answers = greedy_without_cache(weights, cfg, batch, options.num_tokens, progress)
            results |= zip(group, answers)
    return [results[i] for i in range(len(prompts))]


async def compare(options: ParityOptions) -> int:
    """Ask both, compare token by token; the exit status."""
    tokenizer = load_tokenizer(options.model_folder)
    texts = bundled_prompts(options.num_prompts, max_len=options.max_prompt_len)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    async with serving(options, options.speculation, "--dtype", "float32") as server:
        # With log-probabilities the response lists its tokens.
        ask = partial(
            server.complete,
            max_tokens=options.num_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
        )
        answers = await run_all([partial(ask, p) for p in prompts], options.concurrency, "server")
    rows: list[dict[str, Any]] = []
    for index, (answer, reference) in enumerate(zip(answers, references(options, prompts))):
        expected = [tokenizer.token_text(i) for i in reference.token_ids]
        at = first_difference(answer.tokens, expected)
        rows.append(
            {
                "prompt": index,
                "prompt tokens": len(prompts[index]),
                "equal": at is None,
                "first difference": at,
                "server's token": None if at is None else repr(answer.tokens[at]),
                "reference's": None if at is None else repr(expected[at]),
                "gap of the two best there": None if at is None else reference.gaps[at],
                "smallest gap": min(reference.gaps),
            }
        )
    num_equal = sum(row["equal"] for row in rows)
    return Result(
        name="greedy_parity",
        promise=(
            f"{options.num_prompts} prompts x {options.num_tokens} greedy tokens under "
            f"{options.concurrency} concurrent requests equal the reference without a cache"
        ),
        is_kept=num_equal == len(rows),
        rows=rows,
        notes=(f"{num_equal} of {len(rows)} prompts equal, {options.num_tokens} tokens each.",),
        options=options,
    ).finish(options.output)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_benchmark(compare(tyro.cli(ParityOptions, args=argv)))


if __name__ == "__main__":
    sys.exit(main())
