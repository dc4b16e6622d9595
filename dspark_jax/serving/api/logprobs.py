"""Log-probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.serving.request import TokenLogprob
from dspark_jax.serving.tokenizer import Tokens

_LEAST = -9999.0  # JSON has no infinity; vLLM's value for a token that cannot be drawn


def completion_logprobs(
    tokenizer: Tokens,
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The completions form: parallel lists over tokens. None stands for the first prompt token."""
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
        "top_logprobs": [
            None if entry is None else _by_text(tokenizer, entry) for entry in entries
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(tokenizer: Tokens, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The chat form: one object per token, its alternatives most likely first."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        item(entry.token_id, entry.logprob)
        | {"top_logprobs": [item(token_id, value) for token_id, value in _ranked(entry)]}
        for entry in entries
    ]


def _by_text(tokenizer: Tokens, entry: TokenLogprob) -> dict[str, float]:
    """Alternatives by their text, the token itself included as OpenAI does."""
    texts: dict[str, float] = {}
    for token_id, logprob in [*_ranked(entry), (entry.token_id, entry.logprob)]:
        texts.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return texts


def _ranked(entry: TokenLogprob) -> list[tuple[int, float]]:
    return sorted(entry.top.items(), key=lambda item: -item[1])


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
