"""Flags of the load generator. Field docstrings are the text of `--help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dspark_jax.config import ConfigError
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.json_object import json_object

from .client import Backend
from .metrics import METRIC_TITLES

_DEFAULT_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent, whichever server answers."""

    backend: Backend = "openai"
    """Request form: text completions or chat completions."""
    endpoint: str | None = None
    """Path of the endpoint; by default the backend's usual one."""
    model: str | None = None
    """Name of the model; by default the first one that /v1/models lists."""
    served_model_name: str | None = None
    """Name sent in requests where it differs from --model."""
    api_key: str | None = None
    """Sent as a bearer token."""
    header: tuple[str, ...] = ()
    """Further headers, KEY=VALUE."""

    dataset_name: Literal["random", "custom", "bundled"] = "random"
    """random: random token ids. custom: a JSONL file. bundled: the prompts of the bundled model."""
    dataset_path: Path | None = None
    """JSONL for custom, one object a line: "prompt" or "prompt_token_ids", optionally "output_len"."""
    num_prompts: int = 1000
    """Requests to send, in the order of the data set, which starts over when it is too short."""
    output_len: int | None = None
    """Tokens to ask for, over whatever the data set says."""
    custom_output_len: int = 256
    """Tokens to ask for where a line of a custom or bundled data set gives no length."""
    random_input_len: int = 1024
    """Prompt tokens of a random request."""
    random_output_len: int = 128
    """Tokens to ask for in a random request."""
    random_range_ratio: float = 0.0
    """Random lengths vary uniformly by this fraction to either side."""
    random_prefix_len: int = 0
    """Tokens that all random prompts begin with, on top of --random-input-len."""
    random_token_range: tuple[int, int] = (256, 1024)
    """Random ids lie in LOW <= id < HIGH; the default avoids the special tokens of usual vocabularies."""

    ignore_eos: bool = False
    """Generate to the full length. Always on for random prompts."""
    temperature: float | None = None
    """Sampling temperature; the server's default if not given."""
    top_p: float | None = None
    """Nucleus sampling; the server's default if not given."""
    top_k: int | None = None
    """Top-k sampling; the server's default if not given."""
    min_p: float | None = None
    """Min-p sampling; the server's default if not given."""
    extra_body: str = "{}"
    """JSON object merged into every request body, over all other flags."""
    seed: int = 0
    """Of random prompts and arrival times."""

    request_timeout: float = 6 * 3600.0
    """Seconds after which a request counts as failed."""
    percentile_metrics: str = ",".join(METRIC_TITLES)
    """Latency metrics to report, comma-separated."""
    metric_percentiles: str = "99"
    """Percentiles to report for them, comma-separated."""
    disable_tqdm: bool = False
    """No progress bar."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "custom_output_len", "random_input_len", "random_output_len"):
            _require_positive(self, name)
        if self.output_len is not None:
            _require_positive(self, "output_len")
        if not 0 <= self.random_range_ratio < 1:
            raise FlagError(f"--random-range-ratio must be in [0, 1): {self.random_range_ratio}")
        if not 0 <= self.random_token_range[0] < self.random_token_range[1]:
            raise FlagError(f"--random-token-range is empty: {self.random_token_range}")
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise FlagError("--dataset-path goes with --dataset-name custom, and only with it")
        if self.dataset_name == "random" and self.backend == "openai-chat":
            raise FlagError(
                "random prompts are token ids, which chat does not take: use --backend openai"
            )
        _json_object("--extra-body", self.extra_body)
        if unknown := set(self.latency_metrics) - set(METRIC_TITLES):
            raise FlagError(f"--percentile-metrics: {sorted(unknown)} not in {[*METRIC_TITLES]}")
        if not all(0 <= p <= 100 for p in self.percentiles):
            raise FlagError(f"--metric-percentiles must be in [0, 100]: {self.metric_percentiles}")
        key_values(self.header)

    @property
    def endpoint_path(self) -> str:
        """The endpoint, with the backend's default filled in."""
        return self.endpoint or _DEFAULT_ENDPOINTS[self.backend]

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request."""
        auth = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**auth, **key_values(self.header)}

    @property
    def request_body(self) -> dict[str, Any]:
        """Members of every request body besides model, prompt, length and streaming."""
        sampling = {
            name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        body = {name: value for name, value in sampling.items() if value is not None}
        if self.ignore_eos or self.dataset_name == "random":
            body["ignore_eos"] = True
        return {**body, **_json_object("--extra-body", self.extra_body)}

    @property
    def latency_metrics(self) -> list[str]:
        """The names in `--percentile-metrics`."""
        return self.percentile_metrics.split(",")

    @property
    def percentiles(self) -> list[float]:
        """The numbers in `--metric-percentiles`."""
        try:
            return [float(p) for p in self.metric_percentiles.split(",")]
        except ValueError:
            raise FlagError(
                f"--metric-percentiles must be numbers, comma-separated: {self.metric_percentiles}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class BenchConfig(LoadConfig):
    """Measures one running server; `sweep` as the first word compares several (see `sweep --help`)."""

    base_url: str | None = None
    """Server URL without the endpoint; by default built from --host and --port."""
    host: str = "127.0.0.1"
    """Server address."""
    port: int = 8000
    """Server port."""
    request_rate: float = float("inf")
    """Requests per second; inf sends everything at once."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier, inf is even."""
    max_concurrency: int | None = None
    """Requests in flight at most."""
    num_warmups: int = 0
    """Requests sent before the measurement."""
    ready_check_timeout_sec: float = 0.0
    """Wait this long for the server to answer a first request; 0 sends none."""
    label: str | None = None
    """Name of the run in the result and its file name; by default the backend."""
    metadata: tuple[str, ...] = ()
    """KEY=VALUE pairs to keep in the result."""
    save_result: bool = False
    """Write the result as JSON."""
    save_detailed: bool = False
    """Include lengths, times, texts and errors of every request."""
    result_dir: Path = Path()
    """Folder of the result file; made if missing."""
    result_filename: str | None = None
    """Name of the result file; by default label, rate, concurrency, model and date."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.request_rate > 0:
            raise FlagError(f"--request-rate must be positive: {self.request_rate}")
        if not self.burstiness > 0:
            raise FlagError(f"--burstiness must be positive: {self.burstiness}")
        if self.max_concurrency is not None:
            _require_positive(self, "max_concurrency")
        key_values(self.metadata)

    @property
    def url(self) -> str:
        """Server URL without the endpoint."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")


@dataclass(frozen=True, kw_only=True)
class SweepConfig(LoadConfig):
    """Starts the server for every arm and measures it over a range of concurrencies.

    What follows a lone `--` goes to the server unchanged, for example
    `bench sweep --result-dir out -- --model /models/v4 --max-num-seqs 256`.
    """

    dataset_name: Literal["random", "custom", "bundled"] = "bundled"
    """random: random token ids. custom: a JSONL file. bundled: the prompts of the bundled model."""
    num_prompts: int = 256
    """Requests per point, in the order of the data set, which starts over when it is too short."""
    server_command: str | None = None
    """Command that starts the server; by default
    `python -m dspark_jax.serving.serve --no-enable-prefix-caching`."""
    server_args: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """What follows the lone `--`."""
    server_timeout: float = 1800.0
    """Seconds a server may take until /health answers 200."""
    speculative_config: str = (
        '{"method": "dspark", "num_speculative_tokens": 7, "draft_sample_method": "probabilistic"}'
    )
    """JSON that every speculating arm starts from."""
    arms: tuple[str, ...] = ()
    """Arms to measure, of none, fixed-1 ... fixed-k, adaptive; by default all."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Numbers of requests in flight; give the server a --max-num-seqs that holds the largest."""
    prompts_per_stream: int | None = None
    """At concurrency c send c times this, at most --num-prompts, so that small c don't take hours."""
    min_prompts: int = 1
    """With --prompts-per-stream, at least as many: else a point of few requests measures chance."""
    num_warmups: int | None = None
    """Requests sent before each point; by default as many as are in flight at that point."""
    warmup_output_len: int = 32
    """Tokens to ask for while warming up, at most."""
    repeats: int = 1
    """Measurements per point; the median is reported, all are kept."""
    interleave: bool = False
    """Keep the servers of all arms up and visit the arms in turn at every concurrency, so that slow
    drift of the machine meets all alike. Needs room for all servers at once."""
    result_dir: Path = Path("sweep")
    """Folder of sweep.json, sweep.md, pareto.png, speculation.png and the servers' logs."""
    overwrite: bool = False
    """Measure the chosen arms and concurrencies anew instead of adding what sweep.json lacks; with
    other settings than the file's, start a new file."""
    plots: bool = True
    """Draw the pictures; needs matplotlib."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repeats", "warmup_output_len", "min_prompts"):
            _require_positive(self, name)
        if not self.concurrency or min(self.concurrency) < 1:
            raise FlagError(f"--concurrency must be positive: {self.concurrency}")
        own = {"--host", "--port", "--api-key", "--speculative-config"}
        if taken := own & {arg.partition("=")[0] for arg in self.server_args}:
            raise FlagError(
                f"{', '.join(sorted(taken))}: the sweep sets this for its servers; where it has a "
                "flag of the same name, give that one before the lone --"
            )
        _json_object("--speculative-config", self.speculative_config)

    @property
    def base_speculative_config(self) -> dict[str, Any]:
        """The parsed `--speculative-config`."""
        return _json_object("--speculative-config", self.speculative_config)


def key_values(pairs: tuple[str, ...]) -> dict[str, str]:
    """Splits KEY=VALUE pairs; a pair without a key or a `=` is a FlagError."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise FlagError(f"expected KEY=VALUE, got {pair!r}")
        result[key.strip()] = value.strip()
    return result


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ConfigError as error:
        raise FlagError(f"{flag}: {error}") from None


def _require_positive(config: object, name: str) -> None:
    value = getattr(config, name)
    if value < 1:
        raise FlagError(f"--{name.replace('_', '-')} must be at least 1: {value}")
