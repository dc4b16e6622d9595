"""The real server as a process of its own, and the requests that benchmarks send it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from dspark_jax.serving.bench.http import ConnectionPool
from dspark_jax.serving.bench.server import ServerError, free_port, running_server
from dspark_jax.serving.bench.server_metrics import MetricsSnapshot
from dspark_jax.serving.config import ServeConfig

T = TypeVar("T")

FIXED = {"method": "dspark"}
ADAPTIVE = {"method": "dspark", "enable_adaptive_verification": True}
COUPLED = {"rejection_sample_method": "coupled"}
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags that every benchmark has."""

    model: Path | None = None
    """Checkpoint folder; the bundled model if left out."""
    max_num_seqs: int | None = None
    """The server's flag; its default if left out."""
    max_num_batched_tokens: int | None = None
    """The server's flag; its default if left out."""
    compilation_cache_dir: Path | None = None
    """The server's flag; its default if left out."""
    server_timeout: float = 1800.0
    """Seconds a server may take until it is healthy."""
    output: Path | None = None
    """Write the result as JSON here; `python -m benchmarks.report` reads benchmarks/results."""

    @property
    def model_folder(self) -> Path:
        """The checkpoint folder, the bundled one by default."""
        return ServeConfig(model=self.model).model_folder

    @property
    def server_flags(self) -> list[str]:
        """These options as flags of the server."""
        names = ("model", "max_num_seqs", "max_num_batched_tokens", "compilation_cache_dir")
        given = {name: getattr(self, name) for name in names}
        return [
            text
            for name, value in given.items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions(Options):
    """Flags of benchmarks whose server may speculate."""

    speculative_config: str | None = None
    """The server's flag, a JSON object; no speculation if left out."""

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The parsed flag."""
        return None if self.speculative_config is None else json.loads(self.speculative_config)


class RequestFailed(RuntimeError):
    """The server answered with another status than 200; the text has the status and the body."""


@dataclass(frozen=True)
class Answer:
    """One completion: its text, why it ended, how many tokens it has, and the whole response."""

    text: str
    finish_reason: str
    num_tokens: int
    response: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def tokens(self) -> list[str]:
        """The text of every token; the request must have asked for `logprobs`."""
        return self.response["choices"][0]["logprobs"]["tokens"]


@dataclass(frozen=True)
class Server:
    """A server that is up."""

    process: asyncio.subprocess.Process
    pool: ConnectionPool

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """`POST /v1/completions` with further body fields, not streamed; `RequestFailed`, `HttpError`."""
        status, body = await self.post("/v1/completions", json_bytes(prompt=prompt, **fields))
        return read_answer(status, body)

    async def chat(self, content: str, **fields: Any) -> Answer:
        """`POST /v1/chat/completions` with one user message; errors as `complete`."""
        message = {"role": "user", "content": content}
        body = json_bytes(messages=[message], **fields)
        return read_answer(*await self.post("/v1/chat/completions", body))

    async def first_token_s(self, prompt: str, **fields: Any) -> float:
        """Seconds until the first piece of a streamed completion, which is then read to its end."""
        start_s, arrivals = time.perf_counter(), []

        def sink(status: int, data: bytes) -> None:
            if status != 200:
                raise RequestFailed(f"HTTP {status}: {data!r}")
            arrivals.append(time.perf_counter())

        body = json_bytes(prompt=prompt, stream=True, **fields)
        await self.pool.request("POST", "/v1/completions", body, sink)
        return arrivals[0] - start_s

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of one exchange; cancelling the task hangs up on the server."""
        pieces: list[bytes] = []
        status = await self.pool.request("POST", path, body, lambda _, data: pieces.append(data))
        return status, b"".join(pieces)

    async def metrics(self) -> MetricsSnapshot:
        """The server's counters and gauges now."""
        _, body = await self.pool.get("/metrics")
        return MetricsSnapshot.parse(body.decode())

    def rss_mib(self) -> float:
        """Resident memory of the server's process, in MiB (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024


@contextlib.asynccontextmanager
async def serving(
    options: Options, speculative_config: Mapping[str, Any] | None = None, *flags: str
) -> AsyncIterator[Server]:
    """A server on a free port for the length of the block, then ended with its process group.

    It caches no prefixes: benchmarks send the same prompts several times, and each is to cost what a new one does.

    Raises `ServerError` with the end of its log when it does not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", "dspark_jax.serving.serve", "--port", str(port)]
    command += ["--no-enable-prefix-caching", *options.server_flags, *flags]
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
    log_path = Path(tempfile.gettempdir()) / f"dspark-benchmark-{port}.log"
    print(f"starting a server, log in {log_path}: {' '.join(command[2:])}", flush=True)
    pool = ConnectionPool(f"http://127.0.0.1:{port}")
    async with running_server(
        command,
        pool=pool,
        log_path=log_path,
        timeout_s=options.server_timeout,
        stop=asyncio.Event(),
    ) as process:
        yield Server(process, pool)


async def run_all(
    jobs: Sequence[Callable[[], Awaitable[T]]], concurrency: int, title: str
) -> list[T]:
    """Results of `jobs` in their order, started in that order, at most `concurrency` at a time.

    The first exception ends the others and is raised.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run_one(job: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            result = await job()
        progress.update()
        return result

    with tqdm(total=len(jobs), desc=title) as progress:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(job)) for job in jobs]
        except* Exception as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def run_benchmark(benchmark: Coroutine[Any, Any, int]) -> int:
    """Run to the end; the exit status, also for a server that fails and an interruption.

    SIGTERM ends the servers too, as SIGINT does.
    """

    async def main() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await benchmark

    try:
        return asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ServerError, RequestFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def json_bytes(**fields: Any) -> bytes:
    """A request body."""
    return json.dumps(fields).encode()


def read_answer(status: int, body: bytes) -> Answer:
    """The first choice of a response; `RequestFailed` for another status than 200."""
    if status != 200:
        raise RequestFailed(f"HTTP {status}: {body.decode(errors='replace')}")
    response = json.loads(body)
    choice = response["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["finish_reason"], response["usage"]["completion_tokens"], response)
