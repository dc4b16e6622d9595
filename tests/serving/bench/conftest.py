"""A fake server on its own thread, for tests that call the command line in theirs."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from .fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with fake:
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert is_up.wait(10)
    yield fake
    loop.call_soon_threadsafe(is_over.set)
    thread.join(10)
    assert not thread.is_alive()
    loop.close()
