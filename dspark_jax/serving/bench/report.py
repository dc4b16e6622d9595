"""Results as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from .arms import arm_rank
from .metrics import METRIC_TITLES, percentile_key

_WIDTH = 50

_COUNTS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Unfinished requests:", "unfinished", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)

_SPECULATION = (
    ("Acceptance rate (%):", "spec_decode_acceptance_rate", ".2f"),
    ("Acceptance length:", "spec_decode_acceptance_length", ".2f"),
    ("Drafts:", "spec_decode_num_drafts", "d"),
    ("Draft tokens:", "spec_decode_draft_tokens", "d"),
    ("Draft tokens verified:", "dspark_draft_tokens_admitted", "d"),
    ("Draft tokens trimmed:", "dspark_draft_tokens_trimmed", "d"),
    ("Accepted tokens:", "spec_decode_accepted_tokens", "d"),
    ("Verified per draft:", "dspark_verify_len", ".2f"),
)

_ENGINE = (
    ("Steps:", "dspark_num_steps", "d"),
    ("Mean verification budget (tok/step):", "dspark_verification_budget", ".2f"),
    ("Host ms/step outside device, median:", "dspark_median_host_time_ms", ".3f"),
    ("Host ms/step outside device, mean:", "dspark_host_time_ms", ".3f"),
    ("Of it launching, median:", "dspark_median_launch_time_ms", ".3f"),
    ("Engine thread CPU ms/step, median:", "dspark_median_host_cpu_ms", ".3f"),
    ("Engine thread CPU ms/step, mean:", "dspark_host_cpu_ms", ".3f"),
)

_TABLE_COLUMNS = (
    ("concurrency", "max_concurrency", "d"),
    ("output tok/s", "output_throughput", ".1f"),
    ("tok/s per user", "interactivity", ".1f"),
    ("TTFT ms", "median_ttft_ms", ".1f"),
    ("TPOT ms", "median_tpot_ms", ".2f"),
    ("p99 TPOT ms", "p99_tpot_ms", ".2f"),
    ("accepted length", "spec_decode_acceptance_length", ".2f"),
    ("verified per draft", "dspark_verify_len", ".2f"),
    ("budget per step", "dspark_verification_budget", ".1f"),
    ("median host ms/step", "dspark_median_host_time_ms", ".3f"),
    ("of it launching", "dspark_median_launch_time_ms", ".3f"),
    ("median engine CPU ms/step", "dspark_median_host_cpu_ms", ".3f"),
    ("failed", "failed", "d"),
)


def interactivity(result: Mapping[str, Any]) -> float | None:
    """Output tokens per second that the median user sees: 1000 / median time per token in ms."""
    tpot_ms = result.get("median_tpot_ms")
    return 1e3 / tpot_ms if tpot_ms else None


def summary(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """One result as the block that `vllm bench serve` prints, with the server's side behind it."""
    lines = [_title("Serving Benchmark Result", "="), *_rows(result, _COUNTS)]
    for reason, count in result["failure_reasons"].items():
        lines.append(f"  {count} failed: {reason}")
    for metric in metrics:
        name = metric.upper()
        rows = [
            (f"{label} {name} (ms):", f"{key}_{metric}_ms", ".2f")
            for label, key in (("Mean", "mean"), ("Median", "median"))
        ]
        rows += [(f"P{p:g} {name} (ms):", percentile_key(p, metric), ".2f") for p in percentiles]
        lines += [_title(METRIC_TITLES[metric], "-"), *_rows(result, rows)]
    if "spec_decode_num_drafts" in result:
        lines += [_title("Speculative Decoding", "-"), *_rows(result, _SPECULATION)]
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            lines.append(_row(f"  Accepted at position {position} (%):", 100 * rate, ".2f"))
    if engine := _rows(result, _ENGINE):
        lines += [_title("Engine", "-"), *engine]
    if reason := result.get("server_metrics_error"):
        lines.append(f"No server-side numbers: {reason}")
    return "\n".join([*lines, "=" * _WIDTH])


def sweep_table(summaries: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
    """A Markdown table, one row per (arm, concurrency), grouped by concurrency.

    The last column compares output throughput with the arm `none` at the same concurrency.
    """
    header = ["arm", *(title for title, _, _ in _TABLE_COLUMNS), "vs none"]
    rows = [header]
    for arm, concurrency in sorted(summaries, key=lambda key: (key[1], arm_rank(key[0]))):
        result = summaries[arm, concurrency]
        values = {**result, "interactivity": interactivity(result)}
        cells = [_cell(values.get(key), form) for _, key, form in _TABLE_COLUMNS]
        base = summaries.get(("none", concurrency), {}).get("output_throughput")
        gain = 100 * (result["output_throughput"] / base - 1) if base else None
        rows.append([arm, *cells, _cell(gain, "+.1f") + " %" * (gain is not None)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "".join(
        f"| {row[0]:<{widths[0]}} | "
        + " | ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))
        + " |\n"
        for row in [header, rule, *rows[1:]]
    )


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(_WIDTH, fill)


def _rows(result: Mapping[str, Any], rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [_row(label, result[key], form) for label, key, form in rows if key in result]


def _row(label: str, value: float | None, form: str) -> str:
    return f"{label:<41}{_cell(value, form)}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
