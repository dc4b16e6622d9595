"""Greedy text of the engine on this device, with log-probabilities, to compare with another device's.

    python -m benchmarks.device_text --write gpu.json -- [server flags]      # on one machine
    python -m benchmarks.device_text --compare gpu.json -- [server flags]    # on the other

Prints, for every prompt, where the two texts first differ, how far apart the log-probabilities are up to there,
and the gap between the two best tokens at that place: a difference within the arithmetic's error is no
disagreement.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from dspark_jax.serving.config import ServeConfig, parse_flags
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import Request, SamplingParams
from dspark_jax.serving.tokenizer import TextTokenizer

PROMPTS = (
    "def read_file(path):",
    "import os\n\nclass Cache:\n",
    "def test_split(self):\n        ",
    '"""Utilities for',
    "for i, line in enumerate(",
    "    def __init__(self, ",
    "try:\n    import ",
    "async def main():\n",
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Greedy text on this device."""

    max_tokens: int = 96
    """Tokens per prompt."""
    write: Path | None = None
    """File for the result."""
    compare: Path | None = None
    """Result of another device."""
    tolerance: float = 0.1
    """Largest difference of log-probabilities before the texts part."""


async def generate(engine: Engine, tokenizer: TextTokenizer, max_tokens: int) -> list[dict]:
    """Greedy continuations of all prompts at once."""

    async def one(i: int, prompt: str) -> dict:
        request = Request(
            request_id=str(i),
            prompt_token_ids=tuple(tokenizer.encode(prompt, add_special_tokens=True)),
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=0.0, logprobs=2, ignore_eos=True
            ),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        gaps: list[float] = []
        async for chunk in engine.generate(request):
            ids.extend(chunk.token_ids)
            for entry in chunk.logprobs or ():
                best = sorted(entry.top.values(), reverse=True)
                logprobs.append(entry.logprob)
                gaps.append(best[0] - best[1])
        return {"prompt": prompt, "ids": ids, "logprobs": logprobs, "gaps": gaps}

    return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(PROMPTS))))


def compare(ours: list[dict], theirs: list[dict], tolerance: float) -> bool:
    """Print the table; True if the texts agree up to near-ties."""
    agree = True
    for a, b in zip(ours, theirs, strict=True):
        pairs = zip(a["ids"], b["ids"], strict=True)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a["ids"]))
        error = max(
            (abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same])), default=0.0
        )
        verdict = "equal"
        if same < len(a["ids"]):
            verdict = f"differs at {same}, gap of the two best {a['gaps'][same]:.4f}"
            agree &= a["gaps"][same] < 2 * tolerance
        agree &= error < tolerance
        print(f"{a['prompt'][:28]!r:32} {verdict}; largest log-probability error {error:.4f}")
    return agree


def main(argv: list[str]) -> int:
    """Generate, then write or compare."""
    split = argv.index("--") if "--" in argv else len(argv)
    flags = tyro.cli(Flags, args=argv[:split])
    config: ServeConfig = parse_flags(argv[split + 1 :])
    engine = Engine.from_config(config, Metrics("dspark"))
    started = time.perf_counter()
    engine.start()
    print(f"started in {time.perf_counter() - started:.1f} s")
    bos = engine.model_config.bos_token_id
    tokenizer = TextTokenizer.from_folder(config.model_folder, bos_token_id=bos)
    started = time.perf_counter()
    result = asyncio.run(generate(engine, tokenizer, flags.max_tokens))
    seconds = time.perf_counter() - started
    print(f"{len(PROMPTS) * flags.max_tokens / seconds:.0f} tokens/s")
    engine.shutdown()
    for entry in result[:3]:
        text = b"".join(tokenizer.token_bytes(i) for i in entry["ids"])
        print(entry["prompt"] + text.decode(errors="replace"), "\n---")
    if flags.write is not None:
        flags.write.write_text(json.dumps(result))
    if flags.compare is not None:
        return 0 if compare(result, json.loads(flags.compare.read_text()), flags.tolerance) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
