"""From a request body to what the engine is asked for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TypeVar

from dspark_jax.serving.api.errors import ApiError
from dspark_jax.serving.api.generation import Backend, TextOptions
from dspark_jax.serving.api.prompt_text import DSML, THINK_BEGIN, THINK_END
from dspark_jax.serving.api.schema import ChatBody, CompletionBody
from dspark_jax.serving.request import Request, SamplingParams
from dspark_jax.serving.tokenizer import IdTokenizer

Body = CompletionBody | ChatBody
_T = TypeVar("_T")
_MARKERS = (THINK_BEGIN, THINK_END, DSML)


def check_model(backend: Backend, name: str | None) -> None:
    """Raise 404 unless `name` is the served model, or none was given."""
    if name not in (None, backend.model_name):
        raise ApiError(
            f"The model '{name}' does not exist; this server has '{backend.model_name}'.",
            status=404,
            param="model",
            code="model_not_found",
        )


async def encode(backend: Backend, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Raises 400 where the server has no tokenizer."""
    if isinstance(backend.tokenizer, IdTokenizer):
        try:
            return backend.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ApiError(f"{error}.", param=param, code="invalid_value") from error
    # A long text takes long enough to hold up everybody's streams.
    return await asyncio.to_thread(
        backend.tokenizer.encode, text, add_special_tokens=add_special_tokens
    )


def check_prompt(backend: Backend, token_ids: Sequence[int], param: str) -> None:
    """Refuse a prompt that is empty, has ids outside the vocabulary, or leaves no room."""
    if not token_ids:
        raise ApiError("The prompt is empty.", param=param, code="invalid_value")
    vocab_size = backend.engine.model_config.vocab_size
    wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        message = f"Token id {wrong} is outside the vocabulary 0..{vocab_size - 1}."
        raise ApiError(message, param=param, code="invalid_value")
    limit = backend.engine.max_model_len
    if len(token_ids) >= limit:
        raise _too_long(f"The prompt has {len(token_ids)} tokens", limit, param)


def resolve_max_tokens(
    backend: Backend, requested: int | None, default: int | None, num_prompt_tokens: int
) -> int:
    """Tokens to generate: as requested, else the default, else the rest of the context.

    Raises `ApiError` when a requested number does not fit the context.
    """
    rest = backend.engine.max_model_len - num_prompt_tokens
    if requested is None:
        return rest if default is None else min(default, rest)
    if requested > rest:
        message = f"{num_prompt_tokens} prompt tokens and {requested} requested ones are too many"
        raise _too_long(message, backend.engine.max_model_len, "max_tokens")
    return requested


def make_request(
    backend: Backend,
    body: Body,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    choice: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Request:
    """The engine's request for one sequence; `choice` tells apart the `n` of one prompt."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"'min_tokens' {min_tokens} exceeds 'max_tokens' {max_tokens}."
        raise ApiError(message, param="min_tokens", code="invalid_value")
    stop_ids = tuple(body.stop_token_ids or ())
    vocab_size = backend.engine.model_config.vocab_size
    if any(not 0 <= i < vocab_size for i in stop_ids):
        message = f"Stop token ids must lie in 0..{vocab_size - 1}."
        raise ApiError(message, param="stop_token_ids", code="invalid_value")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=None if body.seed is None else (body.seed + choice) % 2**64,
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Request(request_id=uuid.uuid4().hex, prompt_token_ids=tuple(prompt), sampling=sampling)


def text_options(backend: Backend, body: Body) -> TextOptions:
    """How the reply becomes text. Chat keeps the markers that take a reply apart."""
    skipped = (
        backend.tokenizer.special_ids if body.skip_special_tokens is not False else frozenset()
    )
    if isinstance(body, ChatBody):
        skipped -= backend.tokenizer.ids_of(_MARKERS)
    return TextOptions(
        stop=tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        skipped_ids=skipped,
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _too_long(what: str, limit: int, param: str) -> ApiError:
    message = f"{what}, but the context holds {limit}, at least one of them generated."
    return ApiError(message, param=param, code="context_length_exceeded")
