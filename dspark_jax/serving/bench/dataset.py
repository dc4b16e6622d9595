"""Prompts to send, in a fixed order."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text or token ids, and how many tokens to ask for."""

    content: str | list[int]
    output_len: int


def random_prompts(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    token_range: tuple[int, int] = (256, 1024),
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of uniformly random token ids.

    Prompt `i` depends on the seed and on `i` alone, so a longer run extends a shorter one.

    Args:
        num_prompts: how many.
        input_len, output_len: lengths in tokens, `prefix_len` not included.
        range_ratio: lengths are uniform over `len * (1 - ratio) ... len * (1 + ratio)`, in [0, 1).
        prefix_len: leading ids shared by all prompts.
        token_range: ids are drawn from `low <= id < high`.
        seed: of the whole set.
    """
    low, high = token_range
    prefix = np.random.default_rng([seed, 0]).integers(low, high, prefix_len).tolist()
    prompts = []
    for index in range(num_prompts):
        rng = np.random.default_rng([seed, 1 + index])
        lens = [
            int(rng.integers(round(n * (1 - range_ratio)), round(n * (1 + range_ratio)) + 1))
            for n in (input_len, output_len)
        ]
        ids = rng.integers(low, high, max(lens[0], 1)).tolist()
        prompts.append(Prompt(prefix + ids, max(lens[1], 1)))
    return prompts


def parse_jsonl(lines: Iterable[str], *, output_len: int | None, default_len: int) -> list[Prompt]:
    """Reads one prompt per line: `prompt` or `prompt_token_ids`, and optionally `output_len`.

    Args:
        lines: JSON objects, blank lines ignored, unknown members ignored.
        output_len: overrides every line's own length when given.
        default_len: for lines without a length.

    Raises:
        ValueError: a line is not an object with a prompt; names the line.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            content = row["prompt"] if "prompt" in row else row["prompt_token_ids"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'line {number}: expected an object with "prompt" or "prompt_token_ids", '
                f"got {line.strip()[:80]!r}"
            ) from None
        prompts.append(Prompt(content, int(output_len or row.get("output_len") or default_len)))
    if not prompts:
        raise ValueError("no prompts in the data set")
    return prompts


def file_prompts(path: Path, *, output_len: int | None, default_len: int) -> list[Prompt]:
    """Prompts of a JSONL file, see `parse_jsonl`; errors name the file."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_jsonl(lines, output_len=output_len, default_len=default_len)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def bundled_prompts_path() -> Path:
    """The prompts that come with the bundled model, held out from its training."""
    return Path(str(resources.files("dspark_jax") / "bundled" / "prompts.jsonl"))


def cycle_to(prompts: list[Prompt], num_prompts: int) -> list[Prompt]:
    """The first `num_prompts` prompts in order, starting over when the set is shorter."""
    return [prompts[i % len(prompts)] for i in range(num_prompts)]
