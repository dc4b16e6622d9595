"""Prometheus metrics of the server and the periodic log line made from them.

The engine reports steps, load and preemptions; the HTTP layer reports requests, because only it
knows that an aborted request was in fact ended by a stop string. Names and meanings under `vllm:`
are vLLM's, so its dashboards work; `dspark:` names what adaptive verification adds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dspark_jax.serving.calibration_error import CalibrationError
from dspark_jax.serving.request import FinishReason
from dspark_jax.serving.throughput_log import ThroughputLog

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKEN_S = (
    0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_STEP_MS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500, 1000, 2500, 10000)
_TOKENS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Fine around 1 ms, so that a median read off the histogram means something.
_HOST_S = (
    1e-4, 1.5e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4, 9e-4, 1e-3, 1.2e-3, 1.5e-3,
    2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 7.5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5,
)  # fmt: skip
# Drafts are counted for this many steps at once, which takes hardly longer than for one.
_COUNTED_STEPS = 32
_ENGINE = "0"  # one engine per process; vLLM's dashboards select on the label


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One engine step after its outputs reached the host.

    `scheduled`, `admitted` and `accepted` (int [N]) describe the N rows that held a proposal which
    this step could verify, `scheduled` being the whole proposal clamped to the row's limits:
    `accepted <= admitted <= scheduled`. `confidences` (float32 [N, G], conditional, of those same
    proposals) feeds the calibration error. `predicted_ms` and `predicted_accepted` are the budget
    policy's expectations, None where it made none; `num_sanitised` counts the confidences that it could
    not use as they were. `host_s` is host time spent on the step outside
    waiting for the device; where the host's processors are shared, with the device's own threads for example, it
    includes the time in which others had them. `launch_s` is the part of it in which the programs were handed to
    the device. `host_cpu_s` is the processor time alone.
    """

    bucket: int
    budget: int
    step_ms: float
    host_s: float
    launch_s: float
    host_cpu_s: float
    scheduled: np.ndarray
    admitted: np.ndarray
    accepted: np.ndarray
    confidences: np.ndarray | None = None
    predicted_ms: float | None = None
    predicted_accepted: float | None = None
    is_drafter_skipped: bool = False
    num_non_finite: int = 0
    num_sanitised: int = 0


class _Labelled:
    """Children of a metric by the value of its one own label, kept: looking one up costs more than counting."""

    def __init__(self, metric: Counter | Histogram, common: dict[str, str], label: str) -> None:
        self._metric, self._common, self._label = metric, common, label
        self._children: dict[int, Any] = {}

    def __getitem__(self, value: int) -> Any:
        child = self._children.get(value)
        if child is None:
            child = self._metric.labels(**self._common, **{self._label: str(value)})
            self._children[value] = child
        return child


class _BeforeCollection:
    """A collector of nothing, registered first: has the drafts counted before anything is read."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def collect(self) -> Iterable[Any]:
        self._count()
        return ()


class Metrics:
    """Every counter, gauge and histogram of one server, in a registry of its own.

    The engine's methods may run on another thread than the HTTP layer's.
    """

    def __init__(self, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._uncounted: list[StepReport] = []
        self._lock = threading.Lock()  # of `_uncounted` and of what it is counted into
        self.registry.register(_BeforeCollection(self._count_drafts))
        self._labels = {"model_name": model_name, "engine": _ENGINE}
        self._calibration = CalibrationError()
        self._log = ThroughputLog(clock)
        self._declare_requests()
        self._declare_speculation()
        self._declare_steps()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", "engine", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(name, text, tuple(self._labels), registry=self.registry)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, edges: tuple[float, ...], *labels: str) -> Histogram:
        names = ("model_name", "engine", *labels)
        return Histogram(name, text, names, buckets=edges, registry=self.registry)

    def _labelled_counter(self, name: str, text: str, label: str) -> _Labelled:
        return _Labelled(self._counter(name, text, label), self._labels, label)

    def _labelled_histogram(
        self, name: str, text: str, edges: tuple[float, ...], label: str
    ) -> _Labelled:
        return _Labelled(self._histogram(name, text, edges, label), self._labels, label)

    def _declare_requests(self) -> None:
        own = self._labels
        self.num_requests_running = self._gauge(
            "vllm:num_requests_running", "Requests in the batch."
        )
        self.num_requests_waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests waiting to be scheduled."
        )
        self.kv_cache_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of cache pages in use; 1 is all of them."
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.").labels(
            **own
        )
        self.generation_tokens = self._counter(
            "vllm:generation_tokens", "Tokens generated."
        ).labels(**own)
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        ).labels(**own)
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between outputs of a request; a step that yields several tokens counts once.",
            _TOKEN_S,
        ).labels(**own)
        self.time_per_output_token = self._histogram(
            "vllm:time_per_output_token_seconds",
            "First to last token of a request, divided by its tokens after the first.",
            _TOKEN_S,
        ).labels(**own)
        self.e2e_request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end of a request.", _REQUEST_S
        ).labels(**own)
        self.request_success = self._counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        for reason in FinishReason:
            self.request_success.labels(**own, finished_reason=reason.value)
        self.prefix_cache_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        ).labels(**own)
        self.prefix_cache_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that the prefix cache had, so were not fed."
        ).labels(**own)
        preemptions = "Requests put back into the queue because pages ran out."
        self.num_preemptions = self._counter("vllm:num_preemptions", preemptions).labels(**own)
        self.preemptions = self._counter("dspark:preemptions", preemptions).labels(**own)

    def _declare_speculation(self) -> None:
        own, position = self._labels, "position"
        self.num_drafts = self._counter(
            "vllm:spec_decode_num_drafts", "Verifications of a row that held a proposal."
        ).labels(**own)
        self.num_draft_tokens = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens scheduled, trimmed ones included."
        ).labels(**own)
        self.num_accepted_tokens = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."
        ).labels(**own)
        self.accepted_per_position = self._labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by draft position.", position
        )
        self.draft_tokens_admitted = self._counter(
            "dspark:draft_tokens_admitted", "Draft tokens that the target verified."
        ).labels(**own)
        self.draft_tokens_trimmed = self._counter(
            "dspark:draft_tokens_trimmed", "Draft tokens left out by the budget."
        ).labels(**own)
        self.admitted_per_position = self._labelled_counter(
            "dspark:draft_tokens_admitted_per_pos", "Admitted, by draft position.", position
        )
        self.trimmed_per_position = self._labelled_counter(
            "dspark:draft_tokens_trimmed_per_pos", "Trimmed, by draft position.", position
        )
        self.predicted_accepted = self._histogram(
            "dspark:predicted_accepted_tokens", "Accepted drafts a step expected.", _TOKENS
        ).labels(**own)
        self.actual_accepted = self._histogram(
            "dspark:accepted_tokens", "Accepted drafts of a step.", _TOKENS
        ).labels(**own)
        self.calibration_error = self._gauge(
            "dspark:confidence_calibration_error",
            "Expected calibration error of the drafter's confidences over recent drafts.",
        )

    def _declare_steps(self) -> None:
        own = self._labels
        self.verification_budget = self._histogram(
            "dspark:verification_budget", "Drafts that a step verified in all.", _TOKENS
        ).labels(**own)
        self.predicted_step_ms = self._labelled_histogram(
            "dspark:predicted_step_ms", "Step time of the cost model.", _STEP_MS, "bucket"
        )
        self.step_ms = self._labelled_histogram(
            "dspark:step_ms", "Measured step time.", _STEP_MS, "bucket"
        )
        self.host_time = self._histogram(
            "dspark:host_time_seconds", "Host time of a step outside waiting.", _HOST_S
        ).labels(**own)
        self.launch_time = self._histogram(
            "dspark:launch_time_seconds",
            "Host time in which a step is handed to the device.",
            _HOST_S,
        ).labels(**own)
        self.host_cpu_time = self._histogram(
            "dspark:host_cpu_seconds", "Processor time of the engine's thread for a step.", _HOST_S
        ).labels(**own)
        self.drafter_skipped_steps = self._counter(
            "dspark:drafter_skipped_steps", "Steps that ran without the drafter."
        ).labels(**own)
        self.non_finite_rows = self._counter(
            "dspark:non_finite_rows", "Requests that failed because of non-finite logits."
        ).labels(**own)
        self.sanitised_confidences = self._counter(
            "dspark:sanitised_confidences", "Confidences read that were NaN or outside 0..1."
        ).labels(**own)

    def set_load(self, *, running: int, waiting: int, cache_usage: float) -> None:
        """Engine: requests in the batch and in the queue, share (0..1) of cache pages in use."""
        self._log.running, self._log.waiting = running, waiting
        self._log.cache_usage = cache_usage
        self.num_requests_running.set(running)
        self.num_requests_waiting.set(waiting)
        self.kv_cache_usage.set(cache_usage)

    def on_preemption(self) -> None:
        """Engine: one request lost its slot and waits again."""
        self.num_preemptions.inc()
        self.preemptions.inc()

    def on_prefix_lookup(self, num_queries: int, *, num_hits: int) -> None:
        """Engine: the prefix cache was asked for a prompt of so many tokens and had some of them."""
        self.prefix_cache_queries.inc(num_queries)
        self.prefix_cache_hits.inc(num_hits)

    def on_step(self, report: StepReport) -> None:
        """Engine: one step has landed."""
        self._log.add_step()
        self.verification_budget.observe(report.budget)
        self.step_ms[report.bucket].observe(report.step_ms)
        if report.predicted_ms is not None:
            self.predicted_step_ms[report.bucket].observe(report.predicted_ms)
        self.host_time.observe(report.host_s)
        self.launch_time.observe(report.launch_s)
        self.host_cpu_time.observe(report.host_cpu_s)
        for counter, count in (
            (self.drafter_skipped_steps, report.is_drafter_skipped),
            (self.non_finite_rows, report.num_non_finite),
            (self.sanitised_confidences, report.num_sanitised),
        ):
            if count:
                counter.inc(count)
        if report.predicted_accepted is not None:
            self.predicted_accepted.observe(report.predicted_accepted)
        if report.scheduled.any():
            self.actual_accepted.observe(int(report.accepted.sum()))
            with self._lock:
                self._uncounted.append(report)
            if len(self._uncounted) >= _COUNTED_STEPS:
                self._count_drafts()

    def _count_drafts(self) -> None:
        """Count the drafts of the steps since the last call, by position."""
        with self._lock:
            reports, self._uncounted = self._uncounted, []
            if reports:
                self._add_drafts(reports)

    def _add_drafts(self, reports: list[StepReport]) -> None:
        columns = [np.stack([r.scheduled, r.admitted, r.accepted]) for r in reports]
        counts = np.concatenate(columns, axis=1)
        counts = counts[:, counts[0] > 0]
        num_drafts = counts.shape[1]
        longest = int(counts[0].max())
        scheduled, admitted, accepted = (counts[:, :, None] > np.arange(longest)).sum(1)
        self._log.add_drafts(num_drafts, accepted)
        self.num_drafts.inc(num_drafts)
        self.num_draft_tokens.inc(int(scheduled.sum()))
        self.num_accepted_tokens.inc(int(accepted.sum()))
        self.draft_tokens_admitted.inc(int(admitted.sum()))
        self.draft_tokens_trimmed.inc(int((scheduled - admitted).sum()))
        by_position = (
            (self.accepted_per_position, accepted),
            (self.admitted_per_position, admitted),
            (self.trimmed_per_position, scheduled - admitted),
        )
        for counter, totals in by_position:
            for position, count in enumerate(totals.tolist()):
                child = counter[position]  # shows as 0 from now on
                if count:
                    child.inc(count)
        known = [(r, r.confidences) for r in reports if r.confidences is not None]
        if known:
            rows = np.concatenate([r.scheduled for r, _ in known]) > 0
            self._calibration.update(
                np.concatenate([confidences for _, confidences in known])[rows],
                np.concatenate([r.admitted for r, _ in known])[rows],
                np.concatenate([r.accepted for r, _ in known])[rows],
            )
            self.calibration_error.set(self._calibration.value)

    def on_tokens(self, count: int, *, since_last_s: float) -> None:
        """HTTP layer: an output of `count` tokens that is not the request's first arrived."""
        self._log.add_tokens(generation=count)
        self.generation_tokens.inc(count)
        self.inter_token_latency.observe(since_last_s)

    def on_first_tokens(self, count: int, *, num_prompt_tokens: int, ttft_s: float) -> None:
        """HTTP layer: the first output of a request arrived, of `count` tokens."""
        self._log.add_tokens(prompt=num_prompt_tokens, generation=count)
        self.prompt_tokens.inc(num_prompt_tokens)
        self.generation_tokens.inc(count)
        self.time_to_first_token.observe(ttft_s)

    def on_request_finished(
        self, reason: FinishReason, *, e2e_s: float, time_per_token_s: float | None
    ) -> None:
        """HTTP layer: a request ended. `time_per_token_s` is None below two tokens."""
        self.request_success.labels(**self._labels, finished_reason=reason.value).inc()
        self.e2e_request_latency.observe(e2e_s)
        if time_per_token_s is not None:
            self.time_per_output_token.observe(time_per_token_s)

    def render(self) -> tuple[bytes, str]:
        """The exposition of every metric and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def log_line(self) -> str | None:
        """What happened since the last call, or None if the server was idle."""
        self._count_drafts()
        return self._log.line()
