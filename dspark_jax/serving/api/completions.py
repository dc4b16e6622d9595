"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from dspark_jax.serving.api.errors import ApiError
from dspark_jax.serving.api.generation import (
    Backend,
    ChoiceDelta,
    TextOptions,
    generate_choice,
    merge,
)
from dspark_jax.serving.api.logprobs import completion_logprobs
from dspark_jax.serving.api.reply_frame import ReplyFrame
from dspark_jax.serving.api.sampling import (
    check_model,
    check_prompt,
    encode,
    make_request,
    resolve_max_tokens,
    text_options,
)
from dspark_jax.serving.api.schema import DEFAULT_MAX_TOKENS, CompletionBody
from dspark_jax.serving.detokenizer import Detokenizer
from dspark_jax.serving.request import FinishReason, Request


@dataclass(frozen=True)
class _Echo:
    """The prompt as part of the answer."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class _Choice:
    index: int
    request: Request
    echo: _Echo | None


@dataclass(frozen=True)
class Completion:
    """One checked request, ready to run."""

    backend: Backend
    body: CompletionBody
    choices: tuple[_Choice, ...]
    options: TextOptions
    frame: ReplyFrame

    async def answer(self) -> dict[str, Any]:
        """Run to the end; the response."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                parts[piece["index"]].append(piece)
        return self.frame.whole([_join(pieces) for pieces in parts])

    def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response."""
        return self.frame.stream(self._pieces(), self.body.stream_options)

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        lengths = [len(choice.echo.text) if choice.echo else 0 for choice in self.choices]
        pending_echo = {choice.index: choice.echo for choice in self.choices if choice.echo}
        streams = [self._run(choice) for choice in self.choices]
        async with aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                self.frame.account(delta)
                shifted = tuple(offset + lengths[delta.index] for offset in delta.offsets)
                delta = replace(delta, offsets=shifted)
                piece = self._piece(delta, pending_echo.pop(delta.index, None))
                if piece["text"] or piece["logprobs"] or piece["finish_reason"]:
                    yield piece

    def _piece(self, delta: ChoiceDelta, echo: _Echo | None) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            entries, offsets = list(delta.logprobs or ()), list(delta.offsets)
            token_ids = [entry.token_id for entry in entries]
            if echo is not None:
                entries = [*(delta.prompt_logprobs or ()), *entries]
                token_ids = [*echo.token_ids, *token_ids]
                offsets = [*echo.offsets, *offsets]
            if token_ids:
                logprobs = completion_logprobs(self.backend.tokenizer, entries, token_ids, offsets)
        return {
            "index": delta.index,
            "text": (echo.text if echo else "") + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _run(self, choice: _Choice) -> AsyncGenerator[ChoiceDelta, None]:
        if self.body.max_tokens == 0:
            return _only_prompt(self.backend, choice)
        return generate_choice(self.backend, choice.index, choice.request, self.options)


async def plan_completion(backend: Backend, body: CompletionBody) -> Completion:
    """Check a request against the model and the context.

    Raises `ApiError`, naming the field.
    """
    check_model(backend, body.model)
    options = text_options(backend, body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError("'max_tokens' 0 needs 'echo'.", param="max_tokens", code="invalid_value")
    choices: list[_Choice] = []
    num_prompt_tokens = 0
    for prompt in body.prompt:
        token_ids = await _encode(backend, prompt, body.add_special_tokens is not False)
        check_prompt(backend, token_ids, "prompt")
        num_prompt_tokens += len(token_ids)
        max_tokens = resolve_max_tokens(
            backend, body.max_tokens, DEFAULT_MAX_TOKENS, len(token_ids)
        )
        echo = _echo(backend, prompt, token_ids, options) if body.echo else None
        for number in range(body.n or 1):
            request = make_request(
                backend,
                body,
                token_ids,
                max_tokens=max(max_tokens, 1),
                choice=number,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if echo else None,
            )
            choices.append(_Choice(len(choices), request, echo))
    frame = ReplyFrame(
        backend,
        "text_completion",
        "cmpl",
        num_prompt_tokens,
        len(choices),
        choices_per_prompt=body.n or 1,
    )
    return Completion(backend, body, tuple(choices), options, frame)


async def _encode(backend: Backend, prompt: str | list[int], special: bool) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return await encode(backend, prompt, "prompt", add_special_tokens=special)


def _echo(
    backend: Backend, prompt: str | list[int], token_ids: list[int], options: TextOptions
) -> _Echo:
    detokenizer = Detokenizer(backend.tokenizer, skipped_ids=options.skipped_ids)
    piece = detokenizer.push(token_ids)
    text = prompt if isinstance(prompt, str) else piece.text + detokenizer.finish().text
    return _Echo(text, tuple(token_ids), piece.offsets)


async def _only_prompt(backend: Backend, choice: _Choice) -> AsyncGenerator[ChoiceDelta, None]:
    """The prompt alone; its log-probabilities cost a run whose one token is thrown away."""
    prompt_logprobs = None
    if choice.request.sampling.prompt_logprobs is not None:
        stream = generate_choice(backend, choice.index, choice.request, TextOptions())
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                prompt_logprobs = prompt_logprobs or delta.prompt_logprobs
    yield ChoiceDelta(
        index=choice.index,
        text="",
        num_tokens=0,
        offsets=(),
        prompt_logprobs=prompt_logprobs,
        finish_reason=FinishReason.LENGTH.value,
    )


def _join(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    joined = {
        key: [x for part in logprobs for x in part[key]] for key in logprobs[:1] and logprobs[0]
    }
    return {
        **pieces[-1],
        "text": "".join(piece["text"] for piece in pieces),
        "logprobs": joined or None,
    }
