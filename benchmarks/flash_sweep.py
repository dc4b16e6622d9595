"""The sweep of one large model on one GPU: every arm and concurrency through the real server, in pieces of time.

    python -m benchmarks.flash_sweep --layers 30 --deadline-s 480

Weights are random in the released storage, and drafts are accepted after a profile: see `--load-format dummy` and
`--benchmark-synthetic-acceptance` of the server. One server serves all arms; between points its policy changes
(`POST /benchmark/policy`), never its programs. It caches no prefixes, because points share their prompts. A
finished point is saved at once and skipped by the next run, so a sweep can be cut anywhere; `python -m
benchmarks.report` makes the tables and pictures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from benchmarks.flash_model import FLASH, overrides_for
from benchmarks.flash_store import FlashStore, PointKey
from dspark_jax.serving.bench.arms import Arm, make_arms
from dspark_jax.serving.bench.config import BenchConfig
from dspark_jax.serving.bench.dataset import (
    Prompt,
    bundled_prompts_path,
    cycle_to,
    file_prompts,
    random_prompts,
)
from dspark_jax.serving.bench.http import ConnectionPool
from dspark_jax.serving.bench.load import arrival_times, warm_up
from dspark_jax.serving.bench.measure import connect, measure
from dspark_jax.serving.bench.server import Interrupted, ServerError, free_port, running_server
from dspark_jax.serving.bench.step_metrics import StepTimes
from dspark_jax.serving.synthetic_profile import DEFAULT_RATES

# Doublings with a size between them from 64 on: a step pads by a third at most, and few programs are compiled.
_SIZES = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_STOP_S = 12.0  # for the server to end and the files to be written


@dataclass(frozen=True, kw_only=True)
class Options:
    """The sweep of one large model on one GPU, resumable."""

    model: Path = FLASH
    """Folder with a config.json."""
    layers: int | None = None
    """Layers of the model, the first ones in its own order; all if left out. How many fit:
    `python -m benchmarks.flash_memory`."""
    draft_len: int = 7
    """Drafted tokens, in place of the checkpoint's own block size."""
    scenario: str = "decode"
    """Name under which this run's settings and points are kept."""
    arms: tuple[str, ...] = ("none", "fixed-5", "fixed-7", "adaptive")
    """Arms, as `bench sweep` names them."""
    concurrency: tuple[int, ...] = (256, 128, 64, 1, 16, 32)
    """Requests in flight, in the order of measurement."""
    capture_limits: tuple[int, ...] = (2048, 1024)
    """Tokens up to which step sizes are fine. Points whose steps stay below a limit are measured once, with
    the largest."""
    capture_sizes: tuple[int, ...] = _SIZES
    """Step sizes that are compiled."""
    max_num_seqs: int = 256
    """The server's flag."""
    max_num_batched_tokens: int = 2048
    """The server's flag."""
    max_model_len: int = 2048
    """The server's flag."""
    input_len: int = 64
    """Prompt tokens of a random request."""
    dataset: Literal["random", "bundled"] = "random"
    """Prompts: random token ids, or the texts that come with the bundled model, whatever their length."""
    output_len: int = 128
    """Tokens to generate per request."""
    prompts_per_stream: int = 1
    """Requests per stream: concurrency x this many in all."""
    min_prompts: int = 4
    """Requests at the least."""
    request_rate: float = float("inf")
    """Requests per second; with a finite rate prompts arrive during decoding."""
    num_warmups: int = 16
    """Requests before each point, at most as many as are in flight. The start has run every program."""
    warmup_len: int = 8
    """Tokens of each of them."""
    temperature: float = 1.0
    """Of every request."""
    acceptance: str = "default"
    """What --benchmark-synthetic-acceptance is given, `none` for the model's own drafter."""
    load_format: Literal["dummy", "auto"] = "dummy"
    """The server's flag; auto reads the checkpoint, its tokenizer and its own acceptance."""
    compile_processes: int = 1
    """Processes that compile the programs of a dummy model before the server starts: tracing holds Python's
    lock, so that four are faster than one where there are cores."""
    cache_dir: Path = Path("/tmp/dspark_flash")
    """The server's --compilation-cache-dir: programs and cost profile of earlier runs make the start short."""
    gpu_memory_utilization: float | None = None
    """The server's flag."""
    server_args: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Further flags of the server: what follows a lone `--`."""
    deadline_s: float = float("inf")
    """Seconds after which the run must be over; points that do not fit are left for the next."""
    seed: int = 0
    """Of prompts and weights."""
    output: Path = Path("benchmarks/results/flash_sweep.json")
    """Where results accumulate."""
    log: Path = Path("out/flash_server.log")
    """The server's output."""

    @property
    def overrides(self) -> dict[str, Any]:
        """The server's --hf-overrides."""
        return overrides_for(self.model, layers=self.layers, draft_len=self.draft_len)

    @property
    def base_speculative_config(self) -> dict[str, Any]:
        """What all arms share."""
        base: dict[str, Any] = {"method": "dspark", "num_speculative_tokens": self.draft_len}
        if self.acceptance != "none":
            base["rejection_sample_method"] = "synthetic"
            if self.acceptance == "default" and len(DEFAULT_RATES) != self.draft_len:
                base["synthetic_acceptance_rates"] = _stretched(self.draft_len)
        return base

    def server_command(self, port: int) -> list[str]:
        """The command that starts the server: adaptive, so that step times are measured at start."""
        speculative = {**self.base_speculative_config, "enable_adaptive_verification": True}
        sizes = {"cudagraph_capture_sizes": list(self.capture_sizes)}
        command = [sys.executable, "-m", "dspark_jax.serving.serve", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(self.model), "--seed", str(self.seed)]
        command += ["--load-format", self.load_format, "--benchmark-policy-endpoint"]
        command.append("--no-enable-prefix-caching")
        command += ["--speculative-config", json.dumps(speculative)]
        command += ["--compilation-config", json.dumps(sizes)]
        command += ["--compilation-cache-dir", str(self.cache_dir)]
        limits = "max_num_seqs max_num_batched_tokens max_model_len gpu_memory_utilization"
        for name in limits.split():
            if getattr(self, name) is not None:
                command += ["--" + name.replace("_", "-"), str(getattr(self, name))]
        if self.overrides:
            command += ["--hf-overrides", json.dumps(self.overrides)]
        if self.load_format == "dummy":
            command.append("--skip-tokenizer-init")
        if self.acceptance != "none":
            command += ["--benchmark-synthetic-acceptance", self.acceptance]
        return [*command, *self.server_args]

    @property
    def settings(self) -> dict[str, Any]:
        """What points of one scenario must have in common."""
        skipped = {
            "arms", "concurrency", "capture_limits", "cache_dir", "deadline_s", "output", "log", "scenario",
            "gpu_memory_utilization", "compile_processes",
        }  # fmt: skip
        values = dataclasses.asdict(self)
        settings = {k: v for k, v in values.items() if k not in skipped}
        # JSON has no infinity, and the repository may lie elsewhere next time.
        rate = "inf" if self.request_rate == float("inf") else self.request_rate
        return {**settings, "request_rate": rate, "model": self.model.name}


def _stretched(draft_len: int) -> list[float]:
    """The default survivals for another draft length: positions are shared out evenly."""
    count = len(DEFAULT_RATES)
    at = [i * (count - 1) / max(draft_len - 1, 1) for i in range(draft_len)]
    below = [min(int(x), count - 2) for x in at]
    return [
        DEFAULT_RATES[i] + (x - i) * (DEFAULT_RATES[i + 1] - DEFAULT_RATES[i])
        for x, i in zip(at, below)
    ]


def plan_points(options: Options, arms: list[Arm]) -> list[tuple[PointKey, Arm]]:
    """What is to be measured, in order: the largest capture limit first, all arms of a concurrency together.

    Under a smaller limit only those points are new whose steps may exceed it.
    """
    limits = sorted(options.capture_limits, reverse=True)
    points = []
    for limit in limits:
        for concurrency in options.concurrency:
            for arm in arms:
                tokens = concurrency * (_verified(arm, options.draft_len) + 1)
                if limit == limits[0] or tokens > limit:
                    points.append((PointKey(options.scenario, limit, arm.name, concurrency), arm))
    return points


def _verified(arm: Arm, draft_len: int) -> int:
    if arm.speculative_config is None:
        return 0
    return arm.speculative_config.get("fixed_verify_len", draft_len)


@dataclass
class Sweep:
    """A server that is up, and the time that is left."""

    options: Options
    store: FlashStore
    pool: ConnectionPool
    ends_at: float
    stop: asyncio.Event

    async def run(self, points: list[tuple[PointKey, Arm]]) -> bool:
        """Measure what is missing; whether all of it was."""
        options = self.options
        load = BenchConfig(
            dataset_name="random",
            temperature=options.temperature,
            ignore_eos=True,
            seed=options.seed,
            disable_tqdm=True,
            request_rate=options.request_rate,
        )
        client = await connect(load, self.pool)
        took: dict[int, float] = {}
        for key, arm in points:
            started = time.monotonic()
            left = self.ends_at - started
            # The arms of one concurrency take about as long as each other; the first one is a guess.
            if self.stop.is_set() or left < 1.7 * took.get(key.concurrency, 5.0):
                print(f"{_name(key)}: left for another run, {left:.0f} s are left", flush=True)
                return False
            in_force = await self._switch(arm, key.capture)
            prompts = self._prompts(key.concurrency)
            count = min(key.concurrency, options.num_warmups)
            short = [Prompt(p.content, options.warmup_len) for p in prompts[:count]]
            if short:
                await warm_up(client, short, key.concurrency, self.stop)
            before = await self._steps()
            result = await measure(
                client,
                prompts,
                config=load,
                max_concurrency=key.concurrency,
                send_times_s=arrival_times(
                    len(prompts), options.request_rate, load.burstiness, load.seed
                ),
                stop=self.stop,
            )
            if result["unfinished"] or result["failed"]:
                reasons = result["failure_reasons"] or "interrupted"
                print(f"{_name(key)}: not kept, {reasons}", flush=True)
                if result["failed"]:
                    return False
                continue
            result["steps_by_bucket"] = (await self._steps()).since(before)
            result["policy"] = in_force
            result["start"] = len(self.store.starts) - 1
            self.store.add(key, result)
            took[key.concurrency] = time.monotonic() - started
            print(_line(key, result, took[key.concurrency]), flush=True)
        return True

    def _prompts(self, concurrency: int) -> list[Prompt]:
        count = max(concurrency * self.options.prompts_per_stream, self.options.min_prompts)
        if self.options.dataset == "bundled":
            length = self.options.output_len
            texts = file_prompts(bundled_prompts_path(), output_len=length, default_len=length)
            return cycle_to(texts, count)
        return random_prompts(
            count,
            input_len=self.options.input_len,
            output_len=self.options.output_len,
            seed=self.options.seed,
        )

    async def _switch(self, arm: Arm, capture: int) -> dict[str, Any]:
        body = {"speculative_config": arm.speculative_config, "max_capture_tokens": capture}
        received = bytearray()
        status = await self.pool.request(
            "POST",
            "/benchmark/policy",
            json.dumps(body).encode(),
            lambda status, data: received.extend(data),
        )
        if status != 200:
            raise RuntimeError(f"/benchmark/policy: HTTP {status}: {received.decode()}")
        return json.loads(received)

    async def _steps(self) -> StepTimes:
        _, page = await self.pool.get("/metrics")
        return StepTimes.parse(page.decode())


def _name(key: PointKey) -> str:
    return f"{key.scenario} capture {key.capture} {key.arm} c={key.concurrency}"


def _line(key: PointKey, result: dict[str, Any], took_s: float) -> str:
    length = result.get("spec_decode_acceptance_length")
    accepted = f"accepted length {length:.2f}" if length else "no drafts"
    return (
        f"{_name(key)}: {result['output_throughput']:.0f} tok/s, TPOT {result['median_tpot_ms']:.2f} ms, "
        f"{accepted}, budget {result.get('dspark_verification_budget', 0):.0f}; {took_s:.1f} s"
    )


async def run_sweep(options: Options) -> int:
    """Start the server, measure until all is done or time is up; the exit status.

    0 when every point is there, 1 when some are left.
    """
    started = time.monotonic()
    store = FlashStore.open(options.output)
    store.use(options.scenario, options.settings)
    arms = make_arms(options.base_speculative_config, options.arms)
    wanted = plan_points(options, arms)
    missing = [(key, arm) for key, arm in wanted if key not in store.points]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} points are there already", flush=True)
    if not missing:
        return 0
    stop = asyncio.Event()
    ends_at = started + options.deadline_s - _STOP_S
    if ends_at < float("inf"):
        asyncio.get_running_loop().call_later(max(ends_at - started, 0), stop.set)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    pool = ConnectionPool(f"http://127.0.0.1:{port}", {})
    command = options.server_command(port)
    print(" ".join(command), flush=True)
    try:
        # Only with dummy weights are all shapes known before the weights are.
        if options.compile_processes > 1 and options.load_format == "dummy":
            await _precompile(options, command, stop)
            print(f"programs there after {time.monotonic() - started:.1f} s", flush=True)
        async with running_server(
            command,
            pool=pool,
            log_path=options.log,
            timeout_s=max(ends_at - started, 1.0) if ends_at < float("inf") else 3600.0,
            stop=stop,
        ):
            start_s = time.monotonic() - started
            print(f"server up after {start_s:.1f} s", flush=True)
            store.starts.append(_describe_start(options, start_s, command))
            store.save()
            is_done = await Sweep(options, store, pool, ends_at, stop).run(missing)
    except Interrupted:
        print("time was up before the server was", file=sys.stderr)
        is_done = False
    except (ServerError, RuntimeError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        is_done = False
    return 0 if is_done else 1


async def _precompile(options: Options, command: list[str], stop: asyncio.Event) -> None:
    """Compile the server's programs in several processes at once.

    What is compiled stays; what a failed process leaves the server compiles itself. Raises `Interrupted` when time
    is up.
    """
    flags = command[command.index("dspark_jax.serving.serve") + 1 :]
    module = [sys.executable, "-m", "dspark_jax.serving.precompile"]
    # Several processes share the device, and none needs more memory than trying products takes.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    count = options.compile_processes
    with options.log.open("ab") as log:
        processes = [
            await asyncio.create_subprocess_exec(
                *module, "--share", f"{i}/{count}", *flags,
                stdout=log, stderr=asyncio.subprocess.STDOUT, env=environment,
            )
            for i in range(count)
        ]  # fmt: skip
        done = asyncio.gather(*(process.wait() for process in processes))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([done, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not done.done():
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await done
            raise Interrupted
    if any(done.result()):
        print(f"compiling ended with {done.result()}, see {options.log}; the server does the rest")


def _describe_start(options: Options, start_s: float, command: list[str]) -> dict[str, Any]:
    """What a start brings besides points: its duration, where it ran, the measured cost profile."""
    profiles = sorted(
        (options.cache_dir / "profiles").glob("*.json"), key=lambda path: path.stat().st_mtime
    )
    gpus: list[str] = []
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        gpus = output.strip().splitlines()
    profile = json.loads(profiles[-1].read_text()) if profiles else None
    lines = options.log.read_text(errors="replace").splitlines() if options.log.exists() else []
    return {
        "scenario": options.scenario,
        "date": datetime.now().isoformat(timespec="seconds"),
        "start_s": start_s,
        "command": command[1:],
        "gpus": gpus,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": None if profile is None else profile["key"].get("jax"),
        "memory": next((line for line in reversed(lines) if "memory in GiB" in line), None),
        "curves": None if profile is None else profile["curves"],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    split = args.index("--") if "--" in args else len(args)
    options = tyro.cli(Options, args=args[:split])
    options = dataclasses.replace(options, server_args=tuple(args[split + 1 :]))
    return asyncio.run(run_sweep(options))


if __name__ == "__main__":
    sys.exit(main())
