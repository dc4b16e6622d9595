"""Running the sequences of one HTTP request: text, timing, fan-in, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from dspark_jax.serving.api.errors import ApiError, unavailable
from dspark_jax.serving.detokenizer import Detokenizer, TextPiece
from dspark_jax.serving.intake import EngineUnavailable
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import (
    EngineClient,
    FinishReason,
    Request,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
)
from dspark_jax.serving.tokenizer import Tokens


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What the routes work with."""

    engine: EngineClient
    tokenizer: Tokens
    metrics: Metrics
    model_name: str
    reports_speculation: bool = False

    def check_available(self) -> None:
        """Raise 503 when the engine takes no new requests."""
        if not self.engine.is_healthy:
            raise unavailable("The engine has failed.")
        if self.engine.is_draining:
            raise unavailable("The server is shutting down.")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skipped_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What one engine step adds to choice `index`. `finish_reason` is set on its last delta only.

    `offsets` are character offsets of the `num_tokens` new tokens in the choice's text; `logprobs`
    describe the same tokens. `num_cached_tokens` is as in `TokenChunk`.
    """

    index: int
    text: str
    num_tokens: int
    offsets: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    speculation: SpeculationStats | None = None


class _Timer:
    """Reports one sequence to the metrics."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._started_at = time.monotonic()
        self._first_at = self._last_at = 0.0
        self._num_tokens = 0
        self._is_finished = False

    def on_tokens(self, count: int) -> None:
        now = time.monotonic()
        if not self._first_at:
            self._first_at = now
            self._metrics.on_first_tokens(
                count, num_prompt_tokens=self._num_prompt_tokens, ttft_s=now - self._started_at
            )
        else:
            self._metrics.on_tokens(count, since_last_s=now - self._last_at)
        self._last_at = now
        self._num_tokens += count

    def on_finish(self, reason: FinishReason) -> None:
        """Report the end; only the first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        time_per_token_s = None
        if self._num_tokens > 1:
            time_per_token_s = (self._last_at - self._first_at) / (self._num_tokens - 1)
        self._metrics.on_request_finished(
            reason, e2e_s=time.monotonic() - self._started_at, time_per_token_s=time_per_token_s
        )


async def generate_choice(
    backend: Backend, index: int, request: Request, options: TextOptions
) -> AsyncGenerator[ChoiceDelta, None]:
    """Stream one sequence. Closing the iterator aborts it; so does a stop string.

    Raises `ApiError` when the engine fails it.
    """
    detokenizer = Detokenizer(
        backend.tokenizer,
        stop=options.stop,
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
        skipped_ids=options.skipped_ids,
    )
    eos = backend.engine.model_config.eos_token_id
    timer = _Timer(backend.metrics, len(request.prompt_token_ids))
    try:
        async with aclosing(_engine_chunks(backend.engine, request)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    timer.on_tokens(len(chunk.token_ids))
                delta = _delta(index, chunk, detokenizer, options)
                if delta.stop_reason == eos and eos not in request.sampling.stop_token_ids:
                    delta = replace(delta, stop_reason=None)  # the model ended it, not the client
                if delta.finish_reason is not None:
                    timer.on_finish(FinishReason(delta.finish_reason))
                yield delta
                if delta.finish_reason is not None:
                    return
        raise RuntimeError(f"the engine ended {request.request_id} without a finish reason")
    except ApiError as error:
        timer.on_finish(FinishReason.ERROR if error.status == 500 else FinishReason.ABORT)
        raise
    finally:
        timer.on_finish(FinishReason.ABORT)


async def _engine_chunks(
    engine: EngineClient, request: Request
) -> AsyncGenerator[TokenChunk, None]:
    """The engine's chunks, its refusals and failures as `ApiError`."""
    try:
        # The protocol promises that closing aborts, which the type of an iterator does not say.
        stream = cast("AsyncGenerator[TokenChunk, None]", engine.generate(request))
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is FinishReason.ERROR:
                    reason = chunk.error or "the engine failed this request"
                    raise ApiError(reason, status=500, code="generation_failed")
                if chunk.finish_reason is FinishReason.ABORT:
                    raise unavailable("The server ended this request.")
                yield chunk
    except EngineUnavailable as error:
        raise unavailable(f"The request is not taken: {error}.") from error
    except ValueError as error:
        raise ApiError(f"The request cannot run: {error}.") from error


def _delta(
    index: int, chunk: TokenChunk, detokenizer: Detokenizer, options: TextOptions
) -> ChoiceDelta:
    piece = detokenizer.push(
        chunk.token_ids,
        is_last_hidden=chunk.stop_token_id is not None and not options.include_stop,
    )
    finish, stop_reason = chunk.finish_reason, chunk.stop_token_id
    if piece.stop is None and finish is not None:
        rest = detokenizer.finish()
        piece = TextPiece(piece.text + rest.text, piece.num_tokens, piece.offsets, rest.stop)
    if piece.stop is not None:
        finish, stop_reason = FinishReason.STOP, piece.stop
    return ChoiceDelta(
        index=index,
        text=piece.text,
        num_tokens=piece.num_tokens,
        offsets=piece.offsets,
        logprobs=None if chunk.logprobs is None else chunk.logprobs[: piece.num_tokens],
        prompt_logprobs=chunk.prompt_logprobs,
        finish_reason=None if finish is None else finish.value,
        stop_reason=stop_reason,
        num_cached_tokens=chunk.num_cached_tokens,
        speculation=chunk.speculation,
    )


async def merge(
    streams: Sequence[AsyncGenerator[ChoiceDelta, None]],
) -> AsyncGenerator[ChoiceDelta, None]:
    """Deltas of several sequences as they come.

    The first error ends all; so does closing the iterator.
    """
    arrivals: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    arrivals.put_nowait(delta)
        except Exception as error:  # handed to the consumer, who raises it
            arrivals.put_nowait(error)
        else:
            arrivals.put_nowait(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_running = len(tasks)
        while num_running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def add_speculation(stats: Sequence[SpeculationStats]) -> dict[str, float]:
    """The counts of several sequences together, with the rates that follow from them."""
    drafts, scheduled, admitted, accepted = (
        sum(getattr(s, name) for s in stats)
        for name in (
            "num_drafts",
            "num_draft_tokens",
            "num_admitted_tokens",
            "num_accepted_tokens",
        )
    )
    return {
        "num_drafts": drafts,
        "num_draft_tokens": scheduled,
        "num_admitted_tokens": admitted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / scheduled if scheduled else 0.0,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
    }
