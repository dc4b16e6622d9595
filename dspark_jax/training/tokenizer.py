"""The bundled model's tokenizer (byte-level BPE) and the corpus as arrays of token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from dspark_jax.training.corpus import SIDES, Document, Exchange, load_documents, load_exchanges

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
NOISE = "<｜place▁holder▁no▁799｜>"
# The released model's other control tokens; text shown to a user keeps the three plain ones.
_CONTROL = (
    USER,
    ASSISTANT,
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    NOISE,
)
_PLAIN = (THINK, END_THINK, "｜DSML｜")

# Line break with the next line's indentation, words, underscores, single digits, punctuation, blanks.
_PIECES = r"\n[\n ]*| ?\p{L}+| ?_+|\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids.

    Ids 0, 1, 2 are begin, end and padding; the other control tokens take the last ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_PLAIN) - len(_CONTROL),
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in (BOS, EOS, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _PLAIN])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _CONTROL])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text supports {tokenizer.get_vocab_size()} ids, vocab_size asks for {vocab_size}"
        )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a control token; raises `KeyError` if the tokenizer lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"tokenizer has no {token!r}")
    return found


def document_ids(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Begin, the text, end."""
    ids = tokenizer.encode(document.text, add_special_tokens=False).ids
    return [special_id(tokenizer, BOS), *ids, special_id(tokenizer, EOS)]


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """A conversation up to the point where the assistant answers without thinking."""
    return tokenizer.encode(
        f"{BOS}{USER}{question}{ASSISTANT}{END_THINK}", add_special_tokens=False
    ).ids


def exchange_ids(tokenizer: Tokenizer, exchange: Exchange) -> list[int]:
    """`question_ids`, the answer, end."""
    answer = tokenizer.encode(exchange.answer, add_special_tokens=False).ids
    return [*question_ids(tokenizer, exchange.question), *answer, special_id(tokenizer, EOS)]


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """Documents as one run of ids: `tokens` [N] uint16, `starts` [documents] int64 offsets into it.

    `num_bytes` is the size of the text that the ids stand for, for bits per byte.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int


def save_stream(path: Path, documents: Iterable[list[int]], num_bytes: int) -> int:
    """Write documents as a `TokenStream`; returns the number of tokens."""
    rows = [np.asarray(ids, np.uint16) for ids in documents]
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    np.savez(path, tokens=np.concatenate(rows), starts=starts, num_bytes=num_bytes)
    return int(lengths.sum())


def load_stream(path: Path) -> TokenStream:
    """Read what `save_stream` wrote."""
    with np.load(path) as stored:
        return TokenStream(
            tokens=stored["tokens"], starts=stored["starts"], num_bytes=int(stored["num_bytes"])
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Train the tokenizer on the training side and write the corpus as token ids."""

    corpus: Path = Path("out/corpus")
    """Folder written by `dspark_jax.training.corpus`."""
    out: Path = Path("out/tokens")
    """Folder for one .npz per side and kind of text."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder of the shipped model, which gets tokenizer.json."""
    vocab_size: int = 1024
    """Number of ids, control tokens included."""


def main(flags: TokenizerFlags) -> None:
    """Train, encode every side, and print the sizes."""
    # The tokenizers library warns when a process that used its threads forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    train = load_documents(flags.corpus / "train.jsonl")
    train_chat = load_exchanges(flags.corpus / "train_chat.jsonl")
    tokenizer = train_tokenizer(_texts(train, train_chat), flags.vocab_size)
    flags.bundle.mkdir(parents=True, exist_ok=True)
    flags.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(flags.bundle / "tokenizer.json"))
    for side in SIDES:
        documents = load_documents(flags.corpus / f"{side}.jsonl")
        chat = load_exchanges(flags.corpus / f"{side}_chat.jsonl")
        for kind, kept in (
            ("library", [d for d in documents if not d.is_test]),
            ("tests", [d for d in documents if d.is_test]),
        ):
            rows = [document_ids(tokenizer, d) for d in tqdm(kept, f"{side} {kind}")]
            size = sum(len(d.text.encode()) for d in kept)
            _report(side, kind, save_stream(flags.out / f"{side}_{kind}.npz", rows, size), size)
        rows = [exchange_ids(tokenizer, e) for e in tqdm(chat, f"{side} chat")]
        size = sum(len((e.question + e.answer).encode()) for e in chat)
        _report(side, "chat", save_stream(flags.out / f"{side}_chat.npz", rows, size), size)


def _texts(documents: list[Document], chat: list[Exchange]) -> Iterator[str]:
    yield from (d.text for d in documents)
    for exchange in chat:
        yield exchange.question
        yield exchange.answer


def _report(side: str, kind: str, num_tokens: int, num_bytes: int) -> None:
    tqdm.write(f"{side:8} {kind:7} {num_tokens:9} tokens, {num_bytes / num_tokens:.2f} bytes each")


if __name__ == "__main__":
    main(tyro.cli(TokenizerFlags))
