"""A server process that lives as long as a `with` block."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from .http import ConnectionPool

_POLL_S = 0.2
_DRAIN_S = 30.0
_LOG_TAIL_LINES = 5


class ServerError(RuntimeError):
    """The server didn't start. The text gives the reason and the end of its log."""


class Interrupted(Exception):
    """The user asked to stop while the server was starting."""


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def running_server(
    command: Sequence[str],
    *,
    pool: ConnectionPool,
    log_path: Path,
    timeout_s: float,
    stop: asyncio.Event,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts `command`, waits for `GET /health` to answer 200, stops the process in the end.

    The server gets its own session, so that Ctrl-C at the terminal reaches only the caller, which
    then ends the server in order: SIGTERM, 30 s to finish, SIGKILL to the whole process group.

    Args:
        command: program and arguments.
        pool: connections to the address that the command listens on.
        log_path: receives stdout and stderr, appended.
        timeout_s: how long the server may take to become healthy.
        stop: gives up waiting once set.

    Raises:
        ServerError: the process ended, or wasn't healthy in time.
        Interrupted: `stop` was set while waiting.
    """
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )
    try:
        await _until_healthy(process, pool, log_path, timeout_s, stop)
        yield process
    finally:
        pool.close()
        await _terminate(process)


async def _until_healthy(
    process: asyncio.subprocess.Process,
    pool: ConnectionPool,
    log_path: Path,
    timeout_s: float,
    stop: asyncio.Event,
) -> None:
    deadline_s = time.perf_counter() + timeout_s
    state = "no answer"
    while time.perf_counter() < deadline_s:
        if stop.is_set():
            raise Interrupted
        if process.returncode is not None:
            raise ServerError(f"exited with status {process.returncode}: {_log_tail(log_path)}")
        try:
            status, _ = await pool.get("/health")
        except OSError as error:
            state = str(error)
        else:
            if status == 200:
                return
            state = f"HTTP {status}"
        await asyncio.sleep(_POLL_S)
    raise ServerError(f"not healthy after {timeout_s:g} s ({state}): {_log_tail(log_path)}")


async def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _DRAIN_S)
    # What is left of the group, if anything: a stuck server, or a child that outlived it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _log_tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(lines[-_LOG_TAIL_LINES:]) or "(empty log)"
