"""Prompts: prefixes of source text and questions, for sampling, calibration and the shipped benchmark set.

Held-out documents are dealt to two sides, so that calibration is never judged on the text that it was fitted on,
and the shipped prompts come from the second side alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tokenizers import Tokenizer

from dspark_jax.training.data import RowSampler, load_streams
from dspark_jax.training.tokenizer import (
    BOS,
    END_THINK,
    USER,
    TokenStream,
    question_ids,
    special_id,
)

_CHAT_SHARE = 0.2
_FIT_EVERY = 3  # of the held-out documents, one goes to the side that calibration is fitted on


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Ids that tell where a question begins and where the answer does."""

    bos: int
    user: int
    answer: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Markers:
        """The ids of a tokenizer of `training.tokenizer`."""
        return cls(
            bos=special_id(tokenizer, BOS),
            user=special_id(tokenizer, USER),
            answer=special_id(tokenizer, END_THINK),
        )


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids that begin with the begin token; `kind` is "code" or "chat"."""

    ids: np.ndarray
    kind: str


class PromptSampler:
    """Prompts for the drafter's training text: the whole question of a conversation, or a prefix of code.

    They come from documents that the target has not read, as a user's prompts do: behind a prefix of its training
    text it goes on from memory. Lengths of code prefixes are log-uniform. A long prompt is as much text as is
    asked for and such a prefix, or all up to the next answer, behind it.
    """

    def __init__(
        self,
        streams: dict[str, TokenStream],
        markers: Markers,
        *,
        length: int,
        shortest: int = 4,
        longest: int = 256,
        seed: int,
    ):
        self._rows = RowSampler(streams, length, seed)
        # Not the numbers that choose the rows: lengths would follow the kind of text.
        self._draw = np.random.default_rng([seed, 1])
        self._markers = markers
        self._length = length
        self._longest = longest
        self._bounds = np.log(shortest), np.log(longest)

    def __call__(self, rows: int, behind: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Prompts int32 [rows, length] and how much of each row is given, int32 [rows], more than `behind`."""
        starts = self._rows.starts(rows)
        ids = self._rows.tokens[starts[:, None] + np.arange(self._length)].astype(np.int32)
        ids[:, 0] = self._markers.bos
        lens = np.exp(self._draw.uniform(*self._bounds, rows)).astype(np.int32)
        is_chat = ids[:, 1] == self._markers.user
        is_answer = ids[:, behind : behind + self._longest] == self._markers.answer
        lens = np.where(is_chat & is_answer.any(axis=1), np.argmax(is_answer, axis=1) + 1, lens)
        return ids, (behind + lens).astype(np.int32)


def held_out_prompts(
    streams: dict[str, TokenStream],
    markers: Markers,
    count: int,
    *,
    fit: bool,
    shortest: int = 16,
    longest: int = 256,
    seed: int = 0,
) -> list[Prompt]:
    """`count` distinct prompts of one side of the held-out documents (`fit`: the side for calibration), shuffled.

    A fifth are questions. Code prefixes have log-uniform lengths; a third begin where a file does, the rest
    anywhere. Raises `ValueError` if the side has too little text.
    """
    draw = np.random.default_rng([seed, fit])
    questions = [
        Prompt(ids=ids[: int(np.argmax(ids == markers.answer)) + 1], kind="chat")
        for ids in _documents(streams["chat"], fit)
    ]
    draw.shuffle(questions)
    code = [d for kind in ("library", "tests") for d in _documents(streams[kind], fit)]
    code = [d for d in code if len(d) > shortest]
    weights = np.array([len(d) for d in code]) / sum(len(d) for d in code)
    chats = min(round(_CHAT_SHARE * count), len(questions))
    prompts: dict[bytes, Prompt] = {p.ids.tobytes(): p for p in questions[:chats]}
    for _ in range(20 * count):
        if len(prompts) == count:
            break
        document = code[draw.choice(len(code), p=weights)]
        length = int(np.exp(draw.uniform(np.log(shortest), np.log(longest + 1))))
        length = min(length, len(document) - 1)
        first = 0 if draw.random() < 1 / 3 else int(draw.integers(len(document) - length))
        ids = document[first : first + length].copy()
        ids[0] = markers.bos
        prompts.setdefault(ids.tobytes(), Prompt(ids=ids, kind="code"))
    if len(prompts) < count:
        raise ValueError(f"held-out text gives only {len(prompts)} of {count} distinct prompts")
    shuffled = list(prompts.values())
    draw.shuffle(shuffled)
    return shuffled


def _documents(stream: TokenStream, fit: bool) -> list[np.ndarray]:
    documents = np.split(stream.tokens.astype(np.int32), stream.starts[1:])
    return [d for i, d in enumerate(documents) if (i % _FIT_EVERY == 0) is fit]


def prompt_rows(
    prompts: list[Prompt], rows: int, length: int, pad: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts repeated in order as int32 [rows, length], and their lengths [rows]."""
    ids = np.full((rows, length), pad, np.int32)
    lens = np.zeros(rows, np.int32)
    for i in range(rows):
        prompt = prompts[i % len(prompts)].ids
        if len(prompt) >= length:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in {length}")
        ids[i, : len(prompt)] = prompt
        lens[i] = len(prompt)
    return ids, lens


def load_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """The shipped prompts as ids, questions with the conversation around them."""
    bos = special_id(tokenizer, BOS)
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "chat":
            ids = question_ids(tokenizer, row["prompt"])
        else:
            ids = [bos, *tokenizer.encode(row["prompt"], add_special_tokens=False).ids]
        prompts.append(Prompt(ids=np.array(ids, np.int32), kind=row["kind"]))
    return prompts


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Write the prompts that benchmarks use."""

    tokens: Path = Path("out/tokens")
    """Folder written by `dspark_jax.training.tokenizer`."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder of the shipped model: tokenizer.json is read there, prompts.jsonl written."""
    count: int = 880
    """Number of prompts; a prefix of the file is the small set."""
    seed: int = 0
    """Seed of the choice."""


def main(flags: PromptFlags) -> None:
    """Write prompts.jsonl: text, number of tokens when encoded with the begin token, and kind."""
    tokenizer = Tokenizer.from_file(str(flags.bundle / "tokenizer.json"))
    markers = Markers.of(tokenizer)
    held_out = load_streams(flags.tokens, "held_out")
    prompts = held_out_prompts(held_out, markers, flags.count, fit=False, seed=flags.seed)
    with (flags.bundle / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for prompt in prompts:
            row = _row(tokenizer, prompt)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _row(tokenizer: Tokenizer, prompt: Prompt) -> dict[str, str | int]:
    """A shipped line. A chat prompt is the question alone: the server puts the conversation around it."""
    if prompt.kind == "chat":
        text = tokenizer.decode(prompt.ids.tolist(), skip_special_tokens=True)
        text = text.removesuffix(END_THINK)
        return {"prompt": text, "prompt_len": len(prompt.ids), "kind": prompt.kind}
    text = tokenizer.decode(prompt.ids[1:].tolist(), skip_special_tokens=False)
    # A cut need not lie where the tokenizer would have cut.
    num_tokens = 1 + len(tokenizer.encode(text, add_special_tokens=False).ids)
    return {"prompt": text, "prompt_len": num_tokens, "kind": prompt.kind}


if __name__ == "__main__":
    main(tyro.cli(PromptFlags))
