"""What the server's Prometheus page says about a run: counters before and after it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .http import ConnectionPool

_SPEC = "vllm:spec_decode_num_"
_BUDGET = "dspark:verification_budget"
# Metric of seconds per step and what its figures are called in a result.
_STEP_TIMES = {
    "dspark:host_time_seconds": "host_time_ms",
    "dspark:launch_time_seconds": "launch_time_ms",
    "dspark:host_cpu_seconds": "host_cpu_ms",
}
_ADMITTED = "dspark:draft_tokens_admitted_total"
_TRIMMED = "dspark:draft_tokens_trimmed_total"


@dataclass(frozen=True)
class MetricsSnapshot:
    """One reading of `/metrics`.

    Attributes:
        totals: sample name → value, summed over all labels.
        accepted_per_position: draft position → tokens accepted there.
        buckets: name of a histogram of seconds per step → upper bound → steps that took at most that.
    """

    totals: Mapping[str, float]
    accepted_per_position: Mapping[int, float] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MetricsSnapshot":
        """Reads the Prometheus text format.

        Raises:
            ValueError: the text is in another format.
        """
        totals: dict[str, float] = {}
        per_position: dict[int, float] = {}
        buckets: dict[str, dict[float, float]] = {name: {} for name in _STEP_TIMES}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
                if sample.name == f"{_SPEC}accepted_tokens_per_pos_total":
                    position = int(sample.labels["position"])
                    per_position[position] = per_position.get(position, 0.0) + sample.value
                elif (name := sample.name.removesuffix("_bucket")) in buckets:
                    bound, counts = float(sample.labels["le"]), buckets[name]
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        return cls(totals, per_position, buckets)


def server_side_metrics(before: MetricsSnapshot, after: MetricsSnapshot) -> dict[str, Any]:
    """Differences over a run. What the server doesn't export, or didn't do, is absent, not zero.

    Returns:
        * `spec_decode_num_drafts`, `spec_decode_draft_tokens`, `spec_decode_accepted_tokens`:
          counts; a draft is one request's proposal in one step, draft tokens are *scheduled* ones,
          so under adaptive verification trimmed tokens read like rejected ones here;
        * `spec_decode_acceptance_rate`: accepted / scheduled, in percent;
        * `spec_decode_acceptance_length`: 1 + accepted / drafts;
        * `spec_decode_per_position_acceptance_rates`: accepted at the position / drafts, unconditional;
        * `dspark_num_steps`, `dspark_verification_budget`: steps and mean budget per step, in draft
          tokens over all requests;
        * `dspark_draft_tokens_admitted`, `dspark_draft_tokens_trimmed`: the two parts of the
          scheduled tokens, and `dspark_verify_len`: admitted / drafts;
        * `dspark_host_time_ms`, `dspark_median_host_time_ms`: mean and median time per step that the
          host spends outside device work; the median is interpolated between the histogram's bounds.
          Where the device's threads share the processors, it includes the time in which those had them;
        * `dspark_launch_time_ms`, `dspark_median_launch_time_ms`: the part of it in which the host hands the
          step's programs to the device;
        * `dspark_host_cpu_ms`, `dspark_median_host_cpu_ms`: processor time per step of the engine's thread
          alone.

    Raises:
        ValueError: a counter went backwards, so the server restarted during the run.
    """
    delta = {name: value - before.totals.get(name, 0.0) for name, value in after.totals.items()}
    watched = (f"{_SPEC}drafts_total", f"{_BUDGET}_count", *(f"{n}_count" for n in _STEP_TIMES))
    for name in watched:
        if delta.get(name, 0.0) < 0:
            raise ValueError(f"server metric {name} went backwards: the server restarted")
    result: dict[str, Any] = {}
    num_drafts = delta.get(f"{_SPEC}drafts_total", 0.0)
    num_scheduled = delta.get(f"{_SPEC}draft_tokens_total", 0.0)
    if num_drafts and num_scheduled:
        num_accepted = delta.get(f"{_SPEC}accepted_tokens_total", 0.0)
        positions = after.accepted_per_position
        result["spec_decode_acceptance_rate"] = 100.0 * num_accepted / num_scheduled
        result["spec_decode_acceptance_length"] = 1.0 + num_accepted / num_drafts
        result["spec_decode_num_drafts"] = int(num_drafts)
        result["spec_decode_draft_tokens"] = int(num_scheduled)
        result["spec_decode_accepted_tokens"] = int(num_accepted)
        result["spec_decode_per_position_acceptance_rates"] = [
            (positions[i] - before.accepted_per_position.get(i, 0.0)) / num_drafts
            for i in sorted(positions)
        ]
        if _ADMITTED in delta:
            result["dspark_draft_tokens_admitted"] = int(delta[_ADMITTED])
            result["dspark_draft_tokens_trimmed"] = int(delta.get(_TRIMMED, 0.0))
            result["dspark_verify_len"] = delta[_ADMITTED] / num_drafts
    if num_steps := delta.get(f"{_BUDGET}_count"):
        result["dspark_num_steps"] = int(num_steps)
        result["dspark_verification_budget"] = delta[f"{_BUDGET}_sum"] / num_steps
    for metric, name in _STEP_TIMES.items():
        if num_timed := delta.get(f"{metric}_count"):
            earlier = before.buckets.get(metric, {})
            counts = {
                bound: count - earlier.get(bound, 0.0)
                for bound, count in after.buckets[metric].items()
            }
            result[f"dspark_{name}"] = 1e3 * delta[f"{metric}_sum"] / num_timed
            result[f"dspark_median_{name}"] = 1e3 * histogram_median(counts)
    return result


def histogram_median(cumulative: Mapping[float, float]) -> float:
    """Median of a histogram, linear between bounds, from 0; beyond the last finite bound, that bound.

    Args:
        cumulative: upper bound > 0, the last one infinite → samples that are at most the bound.

    Raises:
        ValueError: there is no sample.
    """
    bounds = sorted(cumulative)
    num_samples = cumulative[bounds[-1]] if bounds else 0.0
    if not num_samples:
        raise ValueError("the median of no samples is asked for")
    lower, num_below = 0.0, 0.0
    for bound in bounds:
        if cumulative[bound] >= num_samples / 2:
            break
        lower, num_below = bound, cumulative[bound]
    if math.isinf(bound):
        return lower
    share = (num_samples / 2 - num_below) / (cumulative[bound] - num_below)
    return lower + share * (bound - lower)


@dataclass(frozen=True)
class ServerWatch:
    """The server's counters at the start of a run, to be compared with those at its end."""

    pool: ConnectionPool
    before: MetricsSnapshot | str

    @classmethod
    async def begin(cls, pool: ConnectionPool) -> "ServerWatch":
        """Reads the counters now."""
        return cls(pool, await _read(pool))

    async def end(self) -> dict[str, Any]:
        """The differences, see `server_side_metrics`.

        A server without readable counters is still measured from outside: the reason is then the
        only member, `server_metrics_error`.
        """
        after = await _read(self.pool)
        if isinstance(self.before, str):
            return {"server_metrics_error": self.before}
        if isinstance(after, str):
            return {"server_metrics_error": after}
        try:
            return server_side_metrics(self.before, after)
        except ValueError as error:
            return {"server_metrics_error": str(error)}


async def _read(pool: ConnectionPool) -> MetricsSnapshot | str:
    """The counters now, or why there are none."""
    try:
        status, body = await pool.get("/metrics")
        return MetricsSnapshot.parse(body.decode()) if status == 200 else f"/metrics: HTTP {status}"
    except (OSError, ValueError) as error:
        return f"/metrics: {error}"
