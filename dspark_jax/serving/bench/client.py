"""One streamed completion request, timed at the socket."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .dataset import Prompt
from .http import ConnectionPool, HttpError

Backend = Literal["openai", "openai-chat"]

_MAX_REASON_CHARS = 300


class StreamError(Exception):
    """The server answered, but not with a complete token stream. The text is the reason."""


@dataclass(slots=True)
class RequestRecord:
    """What one request experienced. Times are seconds on the `time.perf_counter` clock.

    Attributes:
        start_s: when the request was handed to the connection.
        ttft_s: from start to the first chunk that carries output; 0 if none came.
        itl_s: gaps between consecutive output chunks. With speculation a chunk carries several
            tokens, so these are gaps per chunk, as `vllm bench serve` counts them.
        latency_s: from start to the last output chunk.
        prompt_tokens, output_tokens: from the server's usage chunk.
        text: the generated text.
        error: empty on success, otherwise why the request counts as failed.
    """

    start_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token behind the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


class TokenStream:
    """Turns the body bytes of one response into a `RequestRecord`.

    Events are cut at line ends while still bytes, so a character split between two network reads
    is whole again before it is decoded. All events of one read share its arrival time.
    """

    def __init__(
        self, record: RequestRecord, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._record = record
        self._clock = clock
        self._buffer = b""
        self._error_body = b""
        self._texts: list[str] = []
        self._last_output_s = 0.0
        self._has_usage = False

    def feed(self, status: int, data: bytes) -> None:
        """Takes the next piece of the body.

        Raises:
            StreamError: an event is no completion chunk, or reports an error.
        """
        now_s = self._clock()
        if status != 200:
            self._error_body += data
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    self._event(payload, now_s)

    def finish(self, status: int) -> None:
        """Closes the record behind a complete body.

        Raises:
            StreamError: the status is not 200, no output came, or the usage is missing.
        """
        if status != 200:
            raise StreamError(f"HTTP {status}: {_reason(self._error_body)}")
        if not self._last_output_s:
            raise StreamError("the stream carried no output")
        if not self._has_usage:
            raise StreamError("the stream carried no usage (stream_options.include_usage ignored?)")
        self._record.text = "".join(self._texts)

    def _event(self, payload: bytes, now_s: float) -> None:
        try:
            event = json.loads(payload)
            if "error" in event:
                raise StreamError(f"error event: {_reason(payload)}")
            if usage := event.get("usage"):
                self._record.prompt_tokens = int(usage["prompt_tokens"])
                self._record.output_tokens = int(usage["completion_tokens"])
                self._has_usage = True
            if choices := event.get("choices"):
                self._choice(choices[0], now_s)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StreamError(f"not a completion event: {payload[:80]!r}") from None

    def _choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
        else:
            text = delta.get("content") or delta.get("reasoning_content") or ""
        is_finish = choice.get("finish_reason") is not None
        if not text and not is_finish and delta is not None and "role" in delta:
            return  # announces the speaker; no token has been made yet
        record = self._record
        if not self._last_output_s:
            record.ttft_s = now_s - record.start_s
        elif text or not is_finish:  # a mark of the end alone is no further chunk of output
            record.itl_s.append(now_s - self._last_output_s)
        record.latency_s = now_s - record.start_s
        self._last_output_s = now_s
        self._texts.append(text)


@dataclass(frozen=True, kw_only=True)
class CompletionClient:
    """Sends prompts to one endpoint.

    Attributes:
        pool: connections to the server.
        backend: which request body and chunk form to speak.
        endpoint: path of the endpoint.
        model: name sent with each request.
        body: further members of each request body; they override the client's own.
        timeout_s: a request that takes longer counts as failed.
    """

    pool: ConnectionPool
    backend: Backend
    endpoint: str
    model: str
    body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 6 * 3600.0

    async def complete(self, prompt: Prompt) -> RequestRecord:
        """Runs one request to its end. Failures are returned in the record, never raised."""
        record = RequestRecord()
        stream = TokenStream(record)
        body = json.dumps(self._request_body(prompt)).encode()
        record.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self.pool.request("POST", self.endpoint, body, stream.feed)
            stream.finish(status)
        except TimeoutError:
            record.error = f"timeout after {self.timeout_s:g} s"
        except (StreamError, HttpError, OSError) as error:
            record.error = str(error) or type(error).__name__
        return record

    def _request_body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if self.backend == "openai-chat":
            if not isinstance(prompt.content, str):
                raise ValueError(
                    "the chat endpoint takes text, not token ids: use --backend openai"
                )
            body["messages"] = [{"role": "user", "content": prompt.content}]
            body["max_completion_tokens"] = prompt.output_len
        else:
            body["prompt"] = prompt.content
            body["max_tokens"] = prompt.output_len
        body["stream_options"] = {"include_usage": True}
        return {**body, **self.body}


def _reason(body: bytes) -> str:
    """The message of an OpenAI-style error body, or the body itself, as one short line."""
    text = body.decode("utf-8", "replace")
    try:
        message = json.loads(text)["error"]
        text = message["message"] if isinstance(message, dict) else str(message)
    except (ValueError, KeyError, TypeError):
        text = text or "(empty body)"
    return " ".join(text.split())[:_MAX_REASON_CHARS]
