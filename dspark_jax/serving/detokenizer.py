"""Token ids to text, incrementally: whole characters, stop strings, nothing lost or repeated."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark_jax.serving.tokenizer import Tokens


@dataclass(frozen=True)
class TextPiece:
    """Text that became final.

    `num_tokens` of the pushed tokens count: all, or those up to the end of `stop`, the stop string
    that ended the request. `offsets` are where their texts begin, in characters of the whole text.
    """

    text: str
    num_tokens: int = 0
    offsets: tuple[int, ...] = ()
    stop: str | None = None


class Detokenizer:
    """Text of one request. Work per token is bounded, whatever the length of the text.

    A stop string is found where it first *ends*, so the result does not depend on how tokens are
    grouped into pushes. Text that may be the beginning of a stop string is held back until that is
    decided. Characters completed by the first `min_tokens` tokens belong to no stop string.
    """

    def __init__(
        self,
        tokenizer: Tokens,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = StopFinder(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skipped_ids = skipped_ids
        self._num_tokens = 0
        self._num_characters = 0  # decoded so far, held back or not

    def push(self, token_ids: Iterable[int], *, is_last_hidden: bool = False) -> TextPiece:
        """Add tokens; `is_last_hidden`: the last one ended the request and is not shown.

        Nothing may be pushed after a piece with `stop` set.
        """
        token_ids = tuple(token_ids)
        texts, offsets = [], []
        for position, token_id in enumerate(token_ids):
            offsets.append(self._num_characters)
            self._num_tokens += 1
            is_hidden = is_last_hidden and position == len(token_ids) - 1
            if is_hidden or token_id in self._skipped_ids:
                continue
            characters = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            text, stop = self._add(characters)
            texts.append(text)
            if stop is not None:
                return TextPiece("".join(texts), position + 1, tuple(offsets), stop)
        return TextPiece("".join(texts), len(token_ids), tuple(offsets))

    def finish(self) -> TextPiece:
        """The rest: an incomplete character becomes U+FFFD and what was held back is released."""
        text, stop = self._add(self._decoder.decode(b"", final=True))
        if stop is not None:
            return TextPiece(text, stop=stop)
        return TextPiece(text + self._stop.release())

    def _add(self, characters: str) -> tuple[str, str | None]:
        self._num_characters += len(characters)
        if self._num_tokens <= self._min_tokens:
            return characters, None
        before, stop = self._stop.push(characters)
        return before + stop if stop and self._include_stop else before, stop


class StopFinder:
    """Finds the first of several strings to end in a text that arrives in pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what precedes any match for certain, and the string found.

        After a match `release` gives the text behind it.
        """
        if not self._strings:
            return text, None
        held = self._held + text
        # Of two that end together the longer one counts: it leaves less text.
        matches = [
            (start + len(string), start, string)
            for string in self._strings
            if (start := held.find(string)) >= 0
        ]
        if matches:
            end, start, string = min(matches)
            self._held = held[end:]
            return held[:start], string
        num_final = len(held) - self._num_undecided(held)
        self._held = held[num_final:]
        return held[:num_final], None

    def release(self) -> str:
        """Hand out what is held back."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
