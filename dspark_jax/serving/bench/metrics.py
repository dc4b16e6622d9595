"""Request records → the numbers of a result, under the keys of `vllm bench serve`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .client import RequestRecord

METRIC_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Latency metrics by key, in the order they are reported."""


def percentile_key(percentile: float, metric: str) -> str:
    """`p99_ttft_ms`, `p99.9_itl_ms`, ..."""
    return f"p{percentile:g}_{metric}_ms"


def throughput_metrics(records: Sequence[RequestRecord], duration_s: float) -> dict[str, Any]:
    """Counts and rates. Failed requests count as failed and contribute no tokens.

    Args:
        records: finished requests, failed ones included.
        duration_s: length of the run, > 0.

    Returns:
        `duration` (s), `completed`, `failed`, `total_input_tokens`, `total_output_tokens`,
        `request_throughput` (1/s), `output_throughput` and `total_token_throughput` (tokens/s).
    """
    good = [record for record in records if not record.error]
    num_input = sum(record.prompt_tokens for record in good)
    num_output = sum(record.output_tokens for record in good)
    return {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }


def latency_metrics(
    records: Sequence[RequestRecord],
    metrics: Sequence[str] = tuple(METRIC_TITLES),
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, float | None]:
    """Mean, median, population standard deviation and percentiles in ms, of successful requests.

    Args:
        records: finished requests.
        metrics: which of `METRIC_TITLES`. Time per output token leaves out requests with fewer than
            two tokens; inter-token latency pools the gaps of all requests.
        percentiles: in percent, interpolated linearly.

    Returns:
        `mean_<metric>_ms`, `median_...`, `std_...`, `p<percentile>_...`; None where no request gives
        a value.
    """
    good = [record for record in records if not record.error]
    samples_s: dict[str, list[float]] = {
        "ttft": [record.ttft_s for record in good],
        "tpot": [record.tpot_s for record in good if record.tpot_s is not None],
        "itl": [gap for record in good for gap in record.itl_s],
        "e2el": [record.latency_s for record in good],
    }
    result: dict[str, float | None] = {}
    for metric in metrics:
        keys = [f"{name}_{metric}_ms" for name in ("mean", "median", "std")]
        keys += [percentile_key(p, metric) for p in percentiles]
        samples_ms = 1e3 * np.asarray(samples_s[metric])
        if samples_ms.size:
            values = [samples_ms.mean(), np.median(samples_ms), samples_ms.std()]
            values += list(np.percentile(samples_ms, list(percentiles)))
            result.update(zip(keys, map(float, values), strict=True))
        else:
            result.update(dict.fromkeys(keys))
    return result


def detail_lists(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Per-request lists for `--save-detailed`; times in seconds, as `vllm bench serve` has them."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start_s for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itl_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }
