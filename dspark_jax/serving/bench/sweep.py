"""Arms × concurrencies: a server per arm, a point per concurrency, one file of results."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from .arms import Arm, make_arms
from .client import CompletionClient
from .config import SweepConfig
from .dataset import Prompt, cycle_to
from .http import ConnectionPool
from .load import warm_up
from .measure import connect, load_prompts, measure
from .plots import draw_pareto, draw_speculation, require_matplotlib
from .report import sweep_table
from .server import Interrupted, ServerError, free_port, running_server
from .store import SweepStore

_NOT_SETTINGS = {
    "api_key", "header", "request_timeout", "disable_tqdm",
    "arms", "concurrency", "repeats", "interleave", "server_timeout",
    "num_warmups", "warmup_output_len", "result_dir", "overwrite", "plots",
}  # fmt: skip
"""Flags that may differ between runs that add to the same file."""


@dataclass(frozen=True)
class RunningArm:
    """An arm whose server is up."""

    arm: Arm
    process: asyncio.subprocess.Process
    client: CompletionClient


async def run_sweep(config: SweepConfig, stop: asyncio.Event) -> bool:
    """Measures what is missing, then writes the table and the pictures of all there is.

    Args:
        config: the flags.
        stop: ends the sweep; finished points stay, the point under way is dropped.

    Returns:
        Whether every point is there and no request failed.

    Raises:
        FlagError: bad arms.
        ValueError: the result file holds other settings.
        ModuleNotFoundError: pictures are wanted and matplotlib is missing.
    """
    if config.plots:
        require_matplotlib()
    arms = make_arms(config.base_speculative_config, config.arms)
    prompts = load_prompts(config)
    config.result_dir.mkdir(parents=True, exist_ok=True)
    store = SweepStore.open(
        config.result_dir / "sweep.json",
        _settings(config),
        _environment(),
        overwrite=config.overwrite,
    )
    for arm in arms:
        store.arm_errors.pop(arm.name, None)
        for concurrency in config.concurrency if config.overwrite else ():
            store.forget(arm.name, concurrency)
    pending = [arm for arm in arms if _missing(arm, store, config)]
    for group in [pending] if config.interleave and pending else [[arm] for arm in pending]:
        if stop.is_set():
            break
        with contextlib.suppress(Interrupted):
            await _run_group(group, prompts, store, config, stop)
    store.save()
    _write_outputs(store, config)
    is_complete = not any(_missing(arm, store, config) for arm in arms)
    return is_complete and not any(s["failed"] for s in store.summaries().values())


async def _run_group(
    group: list[Arm],
    prompts: list[Prompt],
    store: SweepStore,
    config: SweepConfig,
    stop: asyncio.Event,
) -> None:
    """Measures arms whose servers are up at the same time, in turn at every concurrency."""
    async with contextlib.AsyncExitStack() as servers:
        running = []
        for arm in group:
            try:
                running.append(await servers.enter_async_context(_start(arm, config, stop)))
            except (ServerError, OSError, ValueError) as error:
                _arm_failed(store, arm, str(error))
        for concurrency in config.concurrency:
            for repeat in range(config.repeats):
                for server in list(running):
                    if repeat < store.num_repeats(server.arm.name, concurrency):
                        continue
                    try:
                        await _run_point(server, concurrency, repeat, prompts, store, config, stop)
                    except RuntimeError as error:
                        _arm_failed(store, server.arm, f"at concurrency {concurrency}: {error}")
                        running.remove(server)
                    if stop.is_set():
                        return


@contextlib.asynccontextmanager
async def _start(arm: Arm, config: SweepConfig, stop: asyncio.Event):
    """A `RunningArm` for the length of the block; raises as `running_server` and `connect`."""
    port = free_port()
    # Points and arms share their prompts, and each prompt is to cost what a new one does.
    default = [sys.executable, "-m", "dspark_jax.serving.serve", "--no-enable-prefix-caching"]
    command = shlex.split(config.server_command) if config.server_command else default
    command += [*config.server_args, "--host", "127.0.0.1", "--port", str(port)]
    if config.api_key:
        command += ["--api-key", config.api_key]
    if arm.speculative_config is not None:
        command += ["--speculative-config", json.dumps(arm.speculative_config)]
    print(f"{arm.name}: starting the server", flush=True)
    pool = ConnectionPool(f"http://127.0.0.1:{port}", config.headers)
    async with running_server(
        command,
        pool=pool,
        log_path=config.result_dir / f"server-{arm.name}.log",
        timeout_s=config.server_timeout,
        stop=stop,
    ) as process:
        yield RunningArm(arm, process, await connect(config, pool))


async def _run_point(
    server: RunningArm,
    concurrency: int,
    repeat: int,
    prompts: list[Prompt],
    store: SweepStore,
    config: SweepConfig,
    stop: asyncio.Event,
) -> None:
    """Warms up, measures, stores.

    Raises:
        RuntimeError: a warm-up request failed, or the server ended during the measurement.
    """
    if config.prompts_per_stream is not None:
        prompts = prompts[: max(concurrency * config.prompts_per_stream, config.min_prompts)]
    num_warmups = concurrency if config.num_warmups is None else config.num_warmups
    if repeat == 0 and num_warmups:
        short = [
            dataclasses.replace(prompt, output_len=min(prompt.output_len, config.warmup_output_len))
            for prompt in cycle_to(prompts, num_warmups)
        ]
        await warm_up(server.client, short, concurrency, stop)
    result = await measure(
        server.client,
        prompts,
        config=config,
        max_concurrency=concurrency,
        title=f"{server.arm.name} c={concurrency} run {repeat + 1}/{config.repeats}",
        stop=stop,
    )
    if result["unfinished"]:
        print(f"{server.arm.name} c={concurrency}: interrupted, not kept", flush=True)
        return
    if result["failed"]:
        # A server that has just died closes its connections before its exit status is known.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.process.wait(), 1.0)
    if server.process.returncode is not None:
        raise RuntimeError(
            f"server exited with status {server.process.returncode}, "
            f"{result['failed']} of {result['num_prompts']} requests failed"
        )
    store.add(server.arm.name, concurrency, result)
    for reason, count in result["failure_reasons"].items():
        print(f"  {count} failed: {reason}", flush=True)


def _missing(arm: Arm, store: SweepStore, config: SweepConfig) -> bool:
    return any(store.num_repeats(arm.name, c) < config.repeats for c in config.concurrency)


def _arm_failed(store: SweepStore, arm: Arm, reason: str) -> None:
    print(f"{arm.name}: {reason}", file=sys.stderr, flush=True)
    store.arm_errors[arm.name] = reason
    store.save()


def _write_outputs(store: SweepStore, config: SweepConfig) -> None:
    summaries = store.summaries()
    table = sweep_table(summaries)
    errors = "".join(f"\n* {arm}: {reason}\n" for arm, reason in store.arm_errors.items())
    (config.result_dir / "sweep.md").write_text(table + errors, encoding="utf-8")
    print(table + errors)
    if config.plots and summaries:
        draw_pareto(summaries, config.result_dir / "pareto.png")
        draw_speculation(summaries, config.result_dir / "speculation.png")
    print(f"results in {config.result_dir}/")


def _settings(config: SweepConfig) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings = {name: value for name, value in values.items() if name not in _NOT_SETTINGS}
    path = settings["dataset_path"]
    return {**settings, "dataset_path": None if path is None else str(path)}


def _environment() -> dict[str, Any]:
    """Device and versions, found without touching the device."""
    gpus: list[str] = []
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        gpus = output.strip().splitlines()
    return {
        "gpus": gpus,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "dspark_jax": importlib.metadata.version("dspark-jax"),
        "jax": importlib.metadata.version("jax"),
    }
