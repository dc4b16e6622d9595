"""Chunks cross to each event loop once per step, in order."""

import asyncio

import pytest

from dspark_jax.serving.request import FinishReason, TokenChunk
from dspark_jax.serving.streams import Mailbox, Stream


async def test_one_callback_carries_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    callbacks = []
    streams = [Stream(f"r{i}") for i in range(50)]
    mailbox = Mailbox()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: callbacks.append(call))
    for stream in streams:
        mailbox.post(stream, TokenChunk((1,)))
        mailbox.post(stream, TokenChunk((2, 3), FinishReason.LENGTH))
    assert mailbox.deliver() == set()
    ((hand_out, letters),) = callbacks
    hand_out(letters)
    for stream in streams:
        assert [c.token_ids async for c in stream] == [(1,), (2, 3)]


async def test_a_stream_ends_with_its_finish_reason() -> None:
    stream = Stream("r")
    stream.put(TokenChunk((1,)))
    reader = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(TokenChunk((), FinishReason.STOP))
    assert await reader == [(1,), ()]


async def _read(stream: Stream) -> list[tuple[int, ...]]:
    return [chunk.token_ids async for chunk in stream]


def test_chunks_for_a_closed_loop_are_reported() -> None:
    async def open_stream() -> Stream:
        return Stream("r")

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(open_stream())
    loop.close()
    mailbox = Mailbox()
    mailbox.post(stream, TokenChunk((1,)))
    assert mailbox.deliver() == {stream}
    assert mailbox.deliver() == set()
