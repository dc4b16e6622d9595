"""Drives a client with a list of prompts: arrival times, concurrency, warm-up, interruption."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from .client import CompletionClient, RequestRecord
from .dataset import Prompt


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Outcome of one measured run.

    Attributes:
        records: finished requests (failed ones included) in the order of the prompts.
        duration_s: from the first send to the last answer.
        num_unfinished: prompts that were cancelled or never sent because the run was interrupted.
    """

    records: list[RequestRecord]
    duration_s: float
    num_unfinished: int


def arrival_times(
    num_prompts: int, request_rate: float, burstiness: float, seed: int
) -> np.ndarray:
    """Send times in seconds after the start, `[num_prompts]` float64, ascending.

    Gaps follow a gamma distribution of shape `burstiness` (1 is a Poisson process, infinity an even
    pace), scaled so that the last prompt is sent at `num_prompts / request_rate` whatever the seed.
    An infinite rate sends everything at once.
    """
    if request_rate == float("inf"):
        return np.zeros(num_prompts)
    if burstiness == float("inf"):
        gaps = np.ones(num_prompts)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=num_prompts)
    times = np.cumsum(gaps)
    return times * (num_prompts / request_rate / times[-1])


async def wait_until_ready(
    client: CompletionClient, prompt: Prompt, timeout_s: float, stop: asyncio.Event | None = None
) -> None:
    """Repeats one request every second until it succeeds.

    Raises:
        RuntimeError: `timeout_s` seconds have passed; carries the last failure.
    """
    deadline_s = time.perf_counter() + timeout_s
    while error := (await client.complete(prompt)).error:
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"server not ready after {timeout_s:g} s: {error}")
        if stop is not None and stop.is_set():
            return
        await asyncio.sleep(1.0)


async def warm_up(
    client: CompletionClient,
    prompts: Sequence[Prompt],
    max_concurrency: int | None,
    stop: asyncio.Event | None = None,
) -> None:
    """Sends prompts that are not measured.

    Raises:
        RuntimeError: one of them failed; measuring such a server would waste the run.
    """
    result = await run_load(client, prompts, max_concurrency=max_concurrency, stop=stop)
    for record in result.records:
        if record.error:
            raise RuntimeError(f"warm-up request failed: {record.error}")


async def run_load(
    client: CompletionClient,
    prompts: Sequence[Prompt],
    *,
    max_concurrency: int | None = None,
    send_times_s: np.ndarray | None = None,
    progress: "tqdm | None" = None,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Sends the prompts in order and waits for every answer.

    Args:
        client: sends one request.
        prompts: sent in this order, also when the concurrency limit holds requests back.
        max_concurrency: requests in flight at most; no limit if None.
        send_times_s: earliest send time of each prompt, see `arrival_times`; at once if None.
        progress: advanced by one per finished request.
        stop: once set, nothing more is sent and requests in flight are cancelled.
    """
    slots = asyncio.Semaphore(max_concurrency or len(prompts))
    tasks: list[asyncio.Task[RequestRecord]] = []
    num_failed = 0

    def finished(task: asyncio.Task[RequestRecord]) -> None:
        nonlocal num_failed
        slots.release()
        if task.cancelled() or task.exception():
            return
        num_failed += bool(task.result().error)
        if progress is not None:
            progress.set_postfix(failed=num_failed, refresh=False)
            progress.update()

    async def send_all() -> None:
        for i, prompt in enumerate(prompts):
            if send_times_s is not None:
                wait_s = start_s + float(send_times_s[i]) - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            await slots.acquire()
            task = asyncio.create_task(client.complete(prompt))
            task.add_done_callback(finished)
            tasks.append(task)
        await asyncio.gather(*tasks)

    # A collection in the middle of a run would show up as latency of the server.
    gc.collect()
    gc.freeze()
    start_s = time.perf_counter()
    sending = asyncio.create_task(send_all())
    try:
        await _until_done_or_stopped(sending, stop)
        duration_s = time.perf_counter() - start_s
    finally:
        for task in [sending, *tasks]:
            task.cancel()
        await asyncio.gather(sending, *tasks, return_exceptions=True)
        gc.unfreeze()
    records = [task.result() for task in tasks if not task.cancelled()]
    return LoadResult(
        records=records, duration_s=duration_s, num_unfinished=len(prompts) - len(records)
    )


async def _until_done_or_stopped(work: asyncio.Task[None], stop: asyncio.Event | None) -> None:
    """Returns when `work` is done, raising what it raised, or when `stop` is set."""
    if stop is None:
        await work
        return
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if work.done():
        work.result()
