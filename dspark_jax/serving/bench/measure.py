"""One measurement: prompts through a client, counters around it, one flat result."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from tqdm import tqdm

from .client import CompletionClient
from .config import LoadConfig
from .dataset import (
    Prompt,
    bundled_prompts_path,
    cycle_to,
    file_prompts,
    random_prompts,
)
from .http import ConnectionPool
from .load import run_load
from .metrics import detail_lists, latency_metrics, throughput_metrics
from .server_metrics import ServerWatch


def load_prompts(config: LoadConfig) -> list[Prompt]:
    """The `num_prompts` prompts that the flags ask for, in sending order.

    Raises:
        OSError, ValueError: the data set can't be read.
    """
    if config.dataset_name == "random":
        return random_prompts(
            config.num_prompts,
            input_len=config.random_input_len,
            output_len=config.output_len or config.random_output_len,
            range_ratio=config.random_range_ratio,
            prefix_len=config.random_prefix_len,
            token_range=config.random_token_range,
            seed=config.seed,
        )
    path = config.dataset_path or bundled_prompts_path()
    prompts = file_prompts(path, output_len=config.output_len, default_len=config.custom_output_len)
    return cycle_to(prompts, config.num_prompts)


async def connect(config: LoadConfig, pool: ConnectionPool) -> CompletionClient:
    """A client for the server behind `pool`; asks it for its model if the flags name none.

    Raises:
        OSError: the server can't be reached.
        ValueError: it lists no model.
    """
    model = config.served_model_name or config.model
    if model is None:
        model = await first_model(pool)
    return CompletionClient(
        pool=pool,
        backend=config.backend,
        endpoint=config.endpoint_path,
        model=model,
        body=config.request_body,
        timeout_s=config.request_timeout,
    )


async def first_model(pool: ConnectionPool) -> str:
    """The first id that `/v1/models` lists; errors as `connect`."""
    status, body = await pool.get("/v1/models")
    try:
        return json.loads(body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"/v1/models names no model (HTTP {status}): pass --model") from None


async def measure(
    client: CompletionClient,
    prompts: Sequence[Prompt],
    *,
    config: LoadConfig,
    max_concurrency: int | None,
    send_times_s: np.ndarray | None = None,
    has_details: bool = False,
    title: str | None = None,
    stop: asyncio.Event | None = None,
) -> dict[str, Any]:
    """Sends the prompts and returns a result with the keys of `vllm bench serve`.

    Args:
        client: where to send them.
        prompts: what to send, in order.
        config: which latency metrics to report.
        max_concurrency: requests in flight at most.
        send_times_s: see `load.run_load`.
        has_details: add the per-request lists.
        title: text before the progress bar.
        stop: ends the run early; the result covers what was finished and counts the rest under
            `unfinished`.

    Returns:
        Keys of `metrics.throughput_metrics`, `metrics.latency_metrics` and
        `server_metrics.ServerWatch.end`, and: `date`, `backend`, `endpoint_type`, `model_id`,
        `num_prompts`, `max_concurrency`, `unfinished`, `failure_reasons` (reason → count).
    """
    server = await ServerWatch.begin(client.pool)
    with tqdm(total=len(prompts), desc=title, disable=config.disable_tqdm, mininterval=0.5) as bar:
        load = await run_load(
            client,
            prompts,
            max_concurrency=max_concurrency,
            send_times_s=send_times_s,
            progress=bar,
            stop=stop,
        )
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": client.backend,
        "endpoint_type": client.backend,
        "model_id": config.model or client.model,
        "num_prompts": len(prompts),
        "max_concurrency": max_concurrency,
        **throughput_metrics(load.records, load.duration_s),
        "unfinished": load.num_unfinished,
        "failure_reasons": dict(Counter(r.error for r in load.records if r.error).most_common()),
        **latency_metrics(load.records, config.latency_metrics, config.percentiles),
    }
    result |= await server.end()
    if has_details:
        result |= detail_lists(load.records)
    return result
