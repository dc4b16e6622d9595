"""Prompts that the bundled model was not trained on."""

from __future__ import annotations

import json
import sysconfig
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config import load_config
from dspark_jax.serving.bench.dataset import bundled_prompts_path
from dspark_jax.serving.tokenizer import TextTokenizer


def bundled_prompts(
    count: int, kind: Literal["code", "chat"] = "code", *, max_len: int | None = None
) -> list[str]:
    """The first `count` bundled prompts of a kind, of at most `max_len` tokens, no text twice.

    Raises ValueError when there are fewer.
    """
    with bundled_prompts_path().open(encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    fitting = dict.fromkeys(
        row["prompt"]
        for row in rows
        if row["kind"] == kind and (max_len is None or row["prompt_len"] <= max_len)
    )
    if len(fitting) < count:
        raise ValueError(
            f"{count} {kind} prompts of at most {max_len} tokens, there are {len(fitting)}"
        )
    return list(fitting)[:count]


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a checkpoint folder."""
    return TextTokenizer.from_folder(folder, bos_token_id=load_config(folder).bos_token_id)


def held_out_texts() -> dict[str, str]:
    """Name and content of the held-out files of this interpreter's own library.

    Files that this version of Python does not have are left out.
    """
    library = Path(sysconfig.get_path("stdlib"))
    listed = resources.files("dspark_jax").joinpath("bundled/held_out.txt").read_text()
    names = [line for line in listed.splitlines() if line and not line.startswith("#")]
    return {
        name: (library / name).read_text(encoding="utf-8", errors="replace")
        for name in names
        if (library / name).is_file()
    }


def held_out_passages(tokenizer: TextTokenizer, count: int, length: int) -> list[list[int]]:
    """`count` runs of `length` token ids from held-out files, spread evenly over all there are.

    Runs don't overlap. Raises ValueError when the files are too short for as many.
    """
    runs = []
    for text in held_out_texts().values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        runs += [ids[end - length : end] for end in range(length, len(ids) + 1, length)]
    if len(runs) < count:
        raise ValueError(
            f"{count} passages of {length} tokens, the held-out files have {len(runs)}"
        )
    return [runs[i * len(runs) // count] for i in range(count)]
