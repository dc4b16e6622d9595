"""What a client asks for and what comes back, as the engine sees it: token ids, never text."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dspark_jax.config import ModelConfig

MAX_STOP_TOKEN_IDS = 8
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn and when a request ends.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filters off. `seed` None lets the
    engine draw one. `logprobs` and `prompt_logprobs` are numbers of alternatives (0: only the token itself) or
    None. `ignore_eos` keeps going past the end-of-sequence token; `stop_token_ids` stop regardless.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalty(self) -> bool:
        """True if tokens that occurred before are drawn with another probability."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to complete. `prompt_token_ids` is not empty and shorter than the model's context."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # end of sequence or a stop token id
    LENGTH = "length"  # max_tokens or the model's context is used up
    ABORT = "abort"  # the client went away or a stop string was found
    ERROR = "error"  # its logits were not finite, or the engine failed


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token and of its most likely alternatives (id -> log-probability)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class SpeculationStats:
    """Counts over one request: steps that verified a draft, drafted, admitted and accepted tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_admitted_tokens: int = 0
    num_accepted_tokens: int = 0


class TokenChunk(NamedTuple):
    """What one engine step adds to a request. `finish_reason` is set on the last chunk only.

    A tuple, because a step makes one for each of its requests and a frozen dataclass takes twice as long.
    `prompt_logprobs` arrives once, on the first chunk: one entry per prompt token, None for the first. So does
    `num_cached_tokens`, how many prompt tokens were not fed because the prefix cache had them; None without one.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int | None = None
    speculation: SpeculationStats | None = None


class EngineClient(Protocol):
    """The engine as the HTTP layer uses it."""

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def is_healthy(self) -> bool:
        """False once the step loop has failed."""
        ...

    @property
    def is_draining(self) -> bool:
        """True after shutdown was asked for: new requests are refused with 503."""
        ...

    def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Stream the chunks of `request`; closing the iterator early aborts the request."""
        ...
