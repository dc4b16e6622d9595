"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dspark_jax.serving.api.chat import encode_chat, mode_of
from dspark_jax.serving.api.generation import (
    Backend,
    ChoiceDelta,
    TextOptions,
    generate_choice,
    merge,
)
from dspark_jax.serving.api.logprobs import chat_logprobs
from dspark_jax.serving.api.reply import ParsedCall, ReplyParser, ReplyPiece
from dspark_jax.serving.api.reply_frame import ReplyFrame
from dspark_jax.serving.api.sampling import (
    check_model,
    check_prompt,
    encode,
    make_request,
    resolve_max_tokens,
    text_options,
)
from dspark_jax.serving.api.schema import ChatBody
from dspark_jax.serving.request import Request


@dataclass(frozen=True)
class _Piece:
    """What one engine step adds to a choice, its text taken apart."""

    index: int
    reply: ReplyPiece
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class ChatCompletion:
    """One checked request, ready to run."""

    backend: Backend
    body: ChatBody
    requests: tuple[Request, ...]
    options: TextOptions
    is_thinking: bool
    frame: ReplyFrame

    async def answer(self) -> dict[str, Any]:
        """Run to the end; the response."""
        parts: list[list[_Piece]] = [[] for _ in self.requests]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                parts[piece.index].append(piece)
        return self.frame.whole([_whole_choice(pieces) for pieces in parts])

    def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response."""
        return self.frame.stream(self._chunks(), self.body.stream_options)

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        num_calls = [0] * len(self.requests)
        silent = set(range(len(self.requests)))
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece.index in silent:
                    silent.remove(piece.index)
                    yield _chunk(piece.index, {"role": "assistant", "content": ""})
                delta = _stream_delta(piece.reply, num_calls[piece.index])
                num_calls[piece.index] += len(piece.reply.calls)
                if delta or piece.logprobs or piece.finish_reason:
                    yield _chunk(piece.index, delta, piece)

    async def _pieces(self) -> AsyncGenerator[_Piece, None]:
        parses_tools = bool(self.body.tools) and self.body.tool_choice != "none"
        parsers = [
            ReplyParser(is_thinking=self.is_thinking, parses_tools=parses_tools)
            for _ in self.requests
        ]
        called = [False] * len(self.requests)
        streams = [
            generate_choice(self.backend, index, request, self.options)
            for index, request in enumerate(self.requests)
        ]
        async with aclosing(merge(streams)) as deltas:
            async for delta in deltas:
                self.frame.account(delta)
                reply = parsers[delta.index].push(delta.text)
                if delta.finish_reason is not None:
                    reply = _add(reply, parsers[delta.index].finish())
                called[delta.index] |= bool(reply.calls)
                yield self._piece(delta, reply, called[delta.index])

    def _piece(self, delta: ChoiceDelta, reply: ReplyPiece, has_calls: bool) -> _Piece:
        logprobs = None
        if self.body.logprobs:
            logprobs = chat_logprobs(self.backend.tokenizer, delta.logprobs or ())
        finish = delta.finish_reason
        if finish == "stop" and has_calls:
            finish = "tool_calls"
        return _Piece(delta.index, reply, logprobs, finish, delta.stop_reason)


async def plan_chat(backend: Backend, body: ChatBody) -> ChatCompletion:
    """Encode the conversation and check it against the model and the context.

    Raises `ApiError`, naming the field.
    """
    check_model(backend, body.model)
    mode = mode_of(body)
    tools = None if body.tool_choice == "none" else body.tools
    prompt = encode_chat(body.messages, mode, tools)
    token_ids = await encode(backend, prompt, "messages", add_special_tokens=False)
    check_prompt(backend, token_ids, "messages")
    requested = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    max_tokens = resolve_max_tokens(backend, requested, None, len(token_ids))
    requests = tuple(
        make_request(
            backend,
            body,
            token_ids,
            max_tokens=max_tokens,
            choice=number,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        for number in range(body.n or 1)
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    num = len(requests)
    frame = ReplyFrame(backend, kind, "chatcmpl", len(token_ids), num, choices_per_prompt=num)
    options = text_options(backend, body)
    return ChatCompletion(backend, body, requests, options, mode.is_thinking, frame)


def _add(first: ReplyPiece, second: ReplyPiece) -> ReplyPiece:
    return ReplyPiece(
        first.reasoning + second.reasoning,
        first.content + second.content,
        first.calls + second.calls,
    )


def _chunk(index: int, delta: dict[str, Any], piece: _Piece | None = None) -> dict[str, Any]:
    logprobs = piece.logprobs if piece else None
    return {
        "index": index,
        "delta": delta,
        "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
        "finish_reason": piece.finish_reason if piece else None,
        "stop_reason": piece.stop_reason if piece else None,
    }


def _stream_delta(reply: ReplyPiece, num_earlier_calls: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reply.reasoning:
        delta["reasoning_content"] = reply.reasoning
    if reply.content:
        delta["content"] = reply.content
    if reply.calls:
        delta["tool_calls"] = [
            {"index": number, **_call(call)}
            for number, call in enumerate(reply.calls, num_earlier_calls)
        ]
    return delta


def _call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _whole_choice(pieces: list[_Piece]) -> dict[str, Any]:
    reasoning = "".join(piece.reply.reasoning for piece in pieces)
    content = "".join(piece.reply.content for piece in pieces)
    calls = [_call(call) for piece in pieces for call in piece.reply.calls]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    last = pieces[-1]
    logprobs = None
    if last.logprobs is not None:
        items = [item for piece in pieces for item in piece.logprobs or ()]
        logprobs = {"content": items, "refusal": None}
    return {
        "index": last.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
