"""Server-sent events and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_jax.serving.api.errors import ApiError, internal_error

_LOG = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"


def encode_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. Half surrogate pairs cannot occur: all text was decoded from bytes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream(Response):
    """Sends events as they come, then `[DONE]`.

    Nothing is sent before the first event exists, so that a request which fails before has its real
    status; a later error becomes the last event. When the client goes away the event source is
    closed at once, whatever it is waiting for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _unless_disconnected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                event = await anext(events)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await _send_part(send, _encode_event(event))
            try:
                async for event in events:
                    await _send_part(send, _encode_event(event))
            except ApiError as error:
                await _send_part(send, _encode_event(error.body()))
            except Exception:
                _LOG.exception("a stream failed")
                await _send_part(send, _encode_event(internal_error().body()))
        await _send_part(send, _DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _encode_event(event: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"


class JsonBytes(Response):
    """A JSON response of `encode_json`."""

    media_type = "application/json"

    def __init__(self, value: Any) -> None:
        super().__init__(encode_json(value))


async def respond_unless_disconnected(
    request: Request, answer: Coroutine[Any, Any, dict[str, Any]]
) -> Response:
    """The JSON of `answer`, which is cancelled when the client goes away."""
    value = await _unless_disconnected(request.receive, answer)
    return Response(status_code=499) if value is None else JsonBytes(value)


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`; None when the client went away first, after `work` was cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        await _cancel(watcher)
        await _cancel(task)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen; whoever wanted it has already raised it
