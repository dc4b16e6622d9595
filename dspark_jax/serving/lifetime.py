"""The running server: signals, draining, and the end of a failed engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import EngineClient

_LOG = logging.getLogger(__name__)
_LOG_INTERVAL_S = 10.0
_HEALTH_INTERVAL_S = 0.5
# After a failure: time for clients to read their errors and for probes to see /health at 503.
_FAILURE_GRACE_S = 2.0
# After draining: time to flush the last answers to slow clients.
_FLUSH_S = 10


class StoppableEngine(EngineClient, Protocol):
    """An engine whose owner ends it."""

    def shutdown(self, drain: bool) -> None:
        """Block until the running requests are done (`drain`) or dropped."""
        ...


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would close the port at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_until_stopped(
    app: ASGIApp, listener: socket.socket, engine: StoppableEngine, *, metrics: Metrics | None
) -> int:
    """Serve `app` on the bound `listener` until a signal or a failure; the exit status.

    The first SIGTERM or SIGINT drains: running requests finish, new ones get 503. The second ends
    the process at once. With `metrics` a line is logged every ten seconds of activity.
    """
    return asyncio.run(_run(app, listener, engine, metrics))


async def _run(
    app: ASGIApp, listener: socket.socket, engine: StoppableEngine, metrics: Metrics | None
) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_FLUSH_S,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop, number)
    watchers = [asyncio.create_task(_drain_on(stop, engine, server))]
    watchers.append(asyncio.create_task(_end_on_failure(engine, server)))
    if metrics is not None:
        watchers.append(asyncio.create_task(_log_stats(metrics)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    is_failed = not engine.is_healthy
    await asyncio.to_thread(engine.shutdown, drain=False)
    return 1 if is_failed else 0


def _on_signal(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        _LOG.warning("ending at once")
        logging.shutdown()
        # Device threads cannot be interrupted; nothing of this process is worth waiting for.
        os._exit(128 + number)
    _LOG.info("finishing the running requests; once more ends at once")
    stop.set()


async def _drain_on(stop: asyncio.Event, engine: StoppableEngine, server: uvicorn.Server) -> None:
    await stop.wait()
    await asyncio.to_thread(engine.shutdown, drain=True)
    server.should_exit = True


async def _end_on_failure(engine: EngineClient, server: uvicorn.Server) -> None:
    while engine.is_healthy:
        await asyncio.sleep(_HEALTH_INTERVAL_S)
    _LOG.error("the engine has failed; ending")
    await asyncio.sleep(_FAILURE_GRACE_S)
    server.should_exit = True


async def _log_stats(metrics: Metrics) -> None:
    while True:
        await asyncio.sleep(_LOG_INTERVAL_S)
        if line := metrics.log_line():
            _LOG.info("%s", line)
