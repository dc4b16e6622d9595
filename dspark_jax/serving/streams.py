"""The way of chunks from the engine's thread to the event loops of the clients."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable

from dspark_jax.serving.request import TokenChunk


class Stream:
    """The chunks of one request, read on the event loop that was running when it was made.

    What is unread is bounded by the request's `max_tokens`.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._chunks: deque[TokenChunk] = deque()
        self._has_chunks = asyncio.Event()

    def put(self, chunk: TokenChunk) -> None:
        """On the event loop: add a chunk."""
        self._chunks.append(chunk)
        self._has_chunks.set()

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """The chunks as they come, until the one with a finish reason."""
        while True:
            await self._has_chunks.wait()
            self._has_chunks.clear()
            while self._chunks:
                chunk = self._chunks.popleft()
                yield chunk
                if chunk.finish_reason is not None:
                    return


class Mailbox:
    """Chunks of one step, handed to each event loop in a single callback.

    One callback for a step and not for a request, because waking another thread costs more than the step's
    whole planning when hundreds of requests run.
    """

    def __init__(self) -> None:
        self._posted: dict[asyncio.AbstractEventLoop, list[tuple[Stream, TokenChunk]]] = (
            defaultdict(list)
        )

    def post(self, stream: Stream, chunk: TokenChunk) -> None:
        self._posted[stream.loop].append((stream, chunk))

    def deliver(self) -> set[Stream]:
        """Hand everything over; returns the streams whose event loop is closed, so that nobody reads them."""
        unread: set[Stream] = set()
        for loop, letters in self._posted.items():
            try:
                loop.call_soon_threadsafe(_hand_out, letters)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                unread.update(stream for stream, _ in letters)
        self._posted.clear()
        return unread


def _hand_out(letters: Iterable[tuple[Stream, TokenChunk]]) -> None:
    for stream, chunk in letters:
        stream.put(chunk)
