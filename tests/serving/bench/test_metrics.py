"""Numbers of a result against values worked out by hand."""

import math

import pytest

from dspark_jax.serving.bench.client import RequestRecord
from dspark_jax.serving.bench.metrics import latency_metrics, throughput_metrics
from dspark_jax.serving.bench.server_metrics import (
    MetricsSnapshot,
    histogram_median,
    server_side_metrics,
)

RECORDS = [
    RequestRecord(ttft_s=0.1, itl_s=[0.2, 0.3], latency_s=0.6, prompt_tokens=7, output_tokens=6),
    RequestRecord(ttft_s=0.3, itl_s=[0.1], latency_s=0.4, prompt_tokens=5, output_tokens=3),
    RequestRecord(ttft_s=0.2, latency_s=0.2, prompt_tokens=1, output_tokens=1),
    RequestRecord(ttft_s=9.0, itl_s=[9.0], latency_s=99.0, output_tokens=50, error="HTTP 500"),
]


def test_throughput_leaves_failures_out_but_counts_them():
    assert throughput_metrics(RECORDS, 2.0) == {
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 13,
        "total_output_tokens": 10,
        "request_throughput": 1.5,
        "output_throughput": 5.0,
        "total_token_throughput": 11.5,
    }


def test_latencies():
    result = latency_metrics(RECORDS, percentiles=(50.0, 99.0, 99.9))
    expected = {
        # first tokens at 100, 200, 300 ms
        "mean_ttft_ms": 200, "median_ttft_ms": 200, "std_ttft_ms": 100 * (2 / 3) ** 0.5,
        "p50_ttft_ms": 200, "p99_ttft_ms": 298, "p99.9_ttft_ms": 299.8,
        # 500 ms over 5 tokens and 100 ms over 2; the one-token request has none
        "mean_tpot_ms": 75, "median_tpot_ms": 75, "std_tpot_ms": 25,
        "p50_tpot_ms": 75, "p99_tpot_ms": 99.5, "p99.9_tpot_ms": 99.95,
        # gaps of 100, 200, 300 ms
        "mean_itl_ms": 200, "median_itl_ms": 200, "std_itl_ms": 100 * (2 / 3) ** 0.5,
        "p50_itl_ms": 200, "p99_itl_ms": 298, "p99.9_itl_ms": 299.8,
        # 200, 400, 600 ms
        "mean_e2el_ms": 400, "median_e2el_ms": 400, "std_e2el_ms": 200 * (2 / 3) ** 0.5,
        "p50_e2el_ms": 400, "p99_e2el_ms": 596, "p99.9_e2el_ms": 599.6,
    }  # fmt: skip
    assert result == pytest.approx(expected)


def test_no_sample_gives_none_not_zero():
    assert latency_metrics(RECORDS[3:], metrics=("tpot",)) == {
        "mean_tpot_ms": None, "median_tpot_ms": None, "std_tpot_ms": None, "p99_tpot_ms": None,
    }  # fmt: skip


PAGE = """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {scheduled}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
dspark:draft_tokens_admitted_total {admitted}
dspark:draft_tokens_trimmed_total {trimmed}
dspark:verification_budget_bucket{{le="+Inf"}} {steps}
dspark:verification_budget_count {steps}
dspark:verification_budget_sum {budget}
dspark:host_time_seconds_bucket{{le="0.001"}} {quick}
dspark:host_time_seconds_bucket{{le="0.003"}} {steps}
dspark:host_time_seconds_bucket{{le="+Inf"}} {steps}
dspark:host_time_seconds_count {steps}
dspark:host_time_seconds_sum {host}
dspark:launch_time_seconds_bucket{{le="0.0005"}} {steps}
dspark:launch_time_seconds_bucket{{le="+Inf"}} {steps}
dspark:launch_time_seconds_count {steps}
dspark:launch_time_seconds_sum {launch}
dspark:host_cpu_seconds_bucket{{le="0.001"}} {steps}
dspark:host_cpu_seconds_bucket{{le="+Inf"}} {steps}
dspark:host_cpu_seconds_count {steps}
dspark:host_cpu_seconds_sum {cpu}
"""
BEFORE = {
    "drafts": 10, "scheduled": 70, "accepted": 30, "first": 20, "second": 10,
    "admitted": 50, "trimmed": 20, "steps": 5, "budget": 50, "host": 0.5, "quick": 5,
    "cpu": 0.002, "launch": 0.01,
}  # fmt: skip
AFTER = {
    "drafts": 30, "scheduled": 210, "accepted": 58, "first": 36, "second": 22,
    "admitted": 130, "trimmed": 80, "steps": 13, "budget": 130, "host": 0.516, "quick": 7,
    "cpu": 0.008, "launch": 0.012,
}  # fmt: skip


def test_server_side_differences():
    snapshots = [MetricsSnapshot.parse(PAGE.format(**values)) for values in (BEFORE, AFTER)]
    result = server_side_metrics(*snapshots)
    assert result.pop("spec_decode_per_position_acceptance_rates") == pytest.approx([0.8, 0.6])
    assert result == pytest.approx(
        {
            "spec_decode_acceptance_rate": 20.0,  # 28 of 140, in percent
            "spec_decode_acceptance_length": 2.4,  # 1 + 28 / 20
            "spec_decode_num_drafts": 20,
            "spec_decode_draft_tokens": 140,
            "spec_decode_accepted_tokens": 28,
            "dspark_draft_tokens_admitted": 80,
            "dspark_draft_tokens_trimmed": 60,
            "dspark_verify_len": 4.0,
            "dspark_num_steps": 8,
            "dspark_verification_budget": 10.0,
            "dspark_host_time_ms": 2.0,
            # Of 8 steps 2 took up to 1 ms and 6 up to 3 ms: the fourth is a third of the way.
            "dspark_median_host_time_ms": 1 + 2 * 2 / 6,
            "dspark_launch_time_ms": 0.25,
            "dspark_median_launch_time_ms": 0.25,
            "dspark_host_cpu_ms": 0.75,
            "dspark_median_host_cpu_ms": 0.5,
        }
    )


def test_engines_of_one_page_are_added():
    text = "".join(
        f'vllm:spec_decode_{name}_total{{engine="{engine}"}} {value}\n'
        for name, value in (("num_drafts", 2), ("num_draft_tokens", 4))
        for engine in (0, 1)
    )
    result = server_side_metrics(MetricsSnapshot({}), MetricsSnapshot.parse(text))
    assert (result["spec_decode_num_drafts"], result["spec_decode_draft_tokens"]) == (4, 8)


def test_what_did_not_happen_is_absent():
    snapshot = MetricsSnapshot.parse(PAGE.format(**AFTER))
    assert server_side_metrics(snapshot, snapshot) == {}
    assert server_side_metrics(MetricsSnapshot({}), MetricsSnapshot({})) == {}


def test_a_restart_is_an_error():
    snapshots = [MetricsSnapshot.parse(PAGE.format(**values)) for values in (AFTER, BEFORE)]
    with pytest.raises(ValueError, match="the server restarted"):
        server_side_metrics(*snapshots)


@pytest.mark.parametrize(
    ("cumulative", "median"),
    [
        ({1.0: 4, math.inf: 4}, 0.5),
        ({1.0: 0, 2.0: 0, 4.0: 2, math.inf: 2}, 3.0),
        ({1.0: 1, 2.0: 1, 4.0: 2, math.inf: 2}, 1.0),
        ({1.0: 1, math.inf: 9}, 1.0),
    ],
)
def test_median_of_a_histogram(cumulative, median):
    assert histogram_median(cumulative) == pytest.approx(median)


def test_no_samples_have_no_median():
    for cumulative in ({}, {1.0: 0.0, math.inf: 0.0}):
        with pytest.raises(ValueError, match="no samples"):
            histogram_median(cumulative)
