"""Rows of token ids for training, and windows over held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.training.tokenizer import TokenStream, load_stream

KINDS = ("library", "tests", "chat")
"""Kinds of text that are stored, sampled and reported apart."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of a batch is one kind of text, and how much of that starts where a document starts."""

    rows: float
    at_document_start: float


DEFAULT_SHARES = {
    "library": Share(rows=0.4, at_document_start=0.3),
    "tests": Share(rows=0.4, at_document_start=0.3),
    "chat": Share(rows=0.2, at_document_start=1.0),
}


def load_streams(folder: Path, side: str) -> dict[str, TokenStream]:
    """The streams of one side (`corpus.SIDES`), by kind."""
    return {kind: load_stream(folder / f"{side}_{kind}.npz") for kind in KINDS}


class RowSampler:
    """Draws where rows of `length` + 1 ids begin in the concatenated streams (`tokens` [N] uint16).

    Each stream is gone through in shuffled chunks with a new shift per epoch, so every token is seen about equally
    often; a share of the rows is moved back to the start of the document that they fall into.
    """

    def __init__(
        self,
        streams: dict[str, TokenStream],
        length: int,
        seed: int,
        shares: dict[str, Share] = DEFAULT_SHARES,
    ):
        self.tokens = np.concatenate([stream.tokens for stream in streams.values()])
        self._draw = np.random.default_rng(seed)
        self._weights = np.array([shares[kind].rows for kind in streams])
        self._rows = []
        offset = 0
        for kind, stream in streams.items():
            if len(stream.tokens) <= 2 * length:
                raise ValueError(
                    f"{kind} text of {len(stream.tokens)} tokens is too short for rows of {length}"
                )
            self._rows.append(self._chunks(stream, offset, length, shares[kind].at_document_start))
            offset += len(stream.tokens)

    def _chunks(
        self, stream: TokenStream, offset: int, length: int, at_document_start: float
    ) -> Iterator[int]:
        last = len(stream.tokens) - length - 1
        while True:
            starts = np.arange(self._draw.integers(length), last + 1, length)
            for start in self._draw.permutation(starts):
                if self._draw.random() < at_document_start:
                    start = stream.starts[np.searchsorted(stream.starts, start, "right") - 1]
                yield offset + int(start)

    def starts(self, rows: int) -> np.ndarray:
        """Beginnings of the next `rows` rows, int32 [rows]."""
        kinds = self._draw.choice(len(self._rows), size=rows, p=self._weights / self._weights.sum())
        return np.array([next(self._rows[kind]) for kind in kinds], np.int32)


def gather_rows(
    tokens: jax.Array, starts: jax.Array, length: int, bos: int
) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels int32 [B, length] of rows that begin at `starts` [B] in `tokens` [N].

    Whatever a row begins with becomes the begin token, as position 0 always is when the model is used.
    """
    rows = tokens[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
    return rows[:, :-1].at[:, 0].set(bos), rows[:, 1:]


def held_out_windows(
    stream: TokenStream, length: int, bos: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Consecutive windows over a stream: inputs, labels int32 [W, length], and which labels count, bool.

    Every token but the first is a label once.
    """
    tokens = stream.tokens.astype(np.int32)
    windows = -(-(len(tokens) - 1) // length)
    padded = np.pad(tokens, (0, windows * length + 1 - len(tokens)))
    inputs = padded[:-1].reshape(windows, length).copy()
    inputs[:, 0] = bos
    counted = (np.arange(windows * length) < len(tokens) - 1).reshape(windows, length)
    return inputs, padded[1:].reshape(windows, length), counted


def unigram_nats(train: dict[str, TokenStream], held_out: TokenStream, vocab_size: int) -> float:
    """Mean loss on `held_out` of the training text's token frequencies (add-one smoothed), nats per token."""
    counts = np.ones(vocab_size)
    for stream in train.values():
        counts += np.bincount(stream.tokens, minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[held_out.tokens[1:]].mean())
