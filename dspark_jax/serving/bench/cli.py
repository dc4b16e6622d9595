"""`python -m dspark_jax.serving.bench [sweep] ...`: flags in, exit status out."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tyro

from dspark_jax.serving.flag_error import FlagError

from .config import BenchConfig, SweepConfig, key_values
from .dataset import cycle_to
from .http import ConnectionPool
from .load import arrival_times, wait_until_ready, warm_up
from .measure import connect, load_prompts, measure
from .report import summary
from .sweep import run_sweep

_PROG = "python -m dspark_jax.serving.bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0 when every request succeeded, 1 when one failed or the run was cut short, 2 for bad flags.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["sweep"]:
            return asyncio.run(_sweep(_sweep_config(args[1:])))
        config = tyro.cli(BenchConfig, args=args, prog=_PROG)
        return asyncio.run(_bench(config))
    except FlagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _sweep_config(args: list[str]) -> SweepConfig:
    """Everything behind a lone `--` belongs to the server."""
    split = args.index("--") if "--" in args else len(args)
    config = tyro.cli(SweepConfig, args=args[:split], prog=f"{_PROG} sweep")
    return dataclasses.replace(config, server_args=tuple(args[split + 1 :]))


async def _sweep(config: SweepConfig) -> int:
    with _stop_on_signal() as stop:
        return 0 if await run_sweep(config, stop) else 1


async def _bench(config: BenchConfig) -> int:
    prompts = load_prompts(config)
    pool = ConnectionPool(config.url, config.headers)
    with _stop_on_signal() as stop:
        client = await connect(config, pool)
        if config.ready_check_timeout_sec:
            await wait_until_ready(client, prompts[0], config.ready_check_timeout_sec, stop)
        if config.num_warmups:
            await warm_up(
                client, cycle_to(prompts, config.num_warmups), config.max_concurrency, stop
            )
        result = await measure(
            client,
            prompts,
            config=config,
            max_concurrency=config.max_concurrency,
            send_times_s=arrival_times(
                len(prompts), config.request_rate, config.burstiness, config.seed
            ),
            has_details=config.save_detailed,
            stop=stop,
        )
    pool.close()
    result["label"] = config.label
    result["tokenizer_id"] = None  # lengths come from the server's usage, not from a tokenizer
    # JSON has no infinity; the word is what `vllm bench serve` writes.
    result["request_rate"] = config.request_rate if config.request_rate < float("inf") else "inf"
    result["burstiness"] = config.burstiness if config.burstiness < float("inf") else "inf"
    result |= key_values(config.metadata)
    print(summary(result, config.latency_metrics, config.percentiles))
    if config.save_result:
        path = config.result_dir / (config.result_filename or _default_filename(config, result))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
        print(f"saved {path}")
    return 1 if result["failed"] or result["unfinished"] else 0


def _default_filename(config: BenchConfig, result: dict[str, Any]) -> str:
    label = config.label or config.backend
    limit = "" if config.max_concurrency is None else f"-concurrency{config.max_concurrency}"
    model = result["model_id"].rstrip("/").rpartition("/")[2]
    return f"{label}-{config.request_rate}qps{limit}-{model}-{result['date']}.json"


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one has its usual effect."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        print("\nstopping; once more to give up at once", file=sys.stderr)
        stop.set()
        restore()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        restore()
