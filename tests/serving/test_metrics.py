"""Counters against hand-counted steps; the calibration error against its definition."""

import numpy as np
import pytest

from dspark_jax.serving.calibration_error import CalibrationError
from dspark_jax.serving.metrics import Metrics, StepReport


def report(**fields):
    zeros = np.zeros(0, np.int32)
    defaults = {"scheduled": zeros, "admitted": zeros, "accepted": zeros}
    return StepReport(
        **{
            "bucket": 8,
            "budget": 0,
            "step_ms": 4.0,
            "host_s": 1e-3,
            "launch_s": 3e-4,
            "host_cpu_s": 5e-4,
            **defaults,
            **fields,
        }
    )


def drafts():
    return report(
        budget=5,
        scheduled=np.array([5, 3, 0]),
        admitted=np.array([3, 2, 0]),
        accepted=np.array([2, 2, 0]),
        confidences=np.full((3, 5), 0.9, np.float32),
        predicted_ms=3.5,
        predicted_accepted=3.9,
    )


def sample(metrics, name, **labels):
    labels = {"model_name": "m", "engine": "0", **labels}
    return metrics.registry.get_sample_value(name, labels)


def test_prefix_counters_count_tokens():
    metrics = Metrics("m")
    assert sample(metrics, "vllm:prefix_cache_hits_total") == 0
    metrics.on_prefix_lookup(100, num_hits=0)
    metrics.on_prefix_lookup(100, num_hits=64)
    assert sample(metrics, "vllm:prefix_cache_queries_total") == 200
    assert sample(metrics, "vllm:prefix_cache_hits_total") == 64


def test_draft_counters_keep_upstream_meaning():
    metrics = Metrics("m")
    metrics.on_step(drafts())
    metrics.on_step(report())
    assert sample(metrics, "vllm:spec_decode_num_drafts_total") == 2
    assert sample(metrics, "vllm:spec_decode_num_draft_tokens_total") == 8  # scheduled ones
    assert sample(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 4
    assert sample(metrics, "dspark:draft_tokens_admitted_total") == 5
    assert sample(metrics, "dspark:draft_tokens_trimmed_total") == 3
    by_position = {
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": [2, 2, 0, 0, 0],
        "dspark:draft_tokens_admitted_per_pos_total": [2, 2, 1, 0, 0],
        "dspark:draft_tokens_trimmed_per_pos_total": [0, 0, 1, 1, 1],
    }
    for name, counts in by_position.items():
        got = [sample(metrics, name, position=str(i)) for i in range(5)]
        assert got == counts, name


def test_steps_are_timed_by_bucket():
    metrics = Metrics("m")
    metrics.on_step(drafts())
    metrics.on_step(report(bucket=16, step_ms=9.0, is_drafter_skipped=True, num_non_finite=2))
    assert sample(metrics, "dspark:step_ms_sum", bucket="8") == 4
    assert sample(metrics, "dspark:step_ms_sum", bucket="16") == 9
    assert sample(metrics, "dspark:predicted_step_ms_sum", bucket="8") == 3.5
    assert sample(metrics, "dspark:predicted_step_ms_count", bucket="16") is None
    assert sample(metrics, "dspark:verification_budget_sum") == 5
    assert sample(metrics, "dspark:host_time_seconds_sum") == pytest.approx(2e-3)
    assert sample(metrics, "dspark:launch_time_seconds_sum") == pytest.approx(6e-4)
    assert sample(metrics, "dspark:host_cpu_seconds_sum") == pytest.approx(1e-3)
    assert sample(metrics, "dspark:predicted_accepted_tokens_sum") == 3.9
    assert sample(metrics, "dspark:accepted_tokens_sum") == 4
    assert sample(metrics, "dspark:drafter_skipped_steps_total") == 1
    assert sample(metrics, "dspark:non_finite_rows_total") == 2


def test_preemptions_count_under_both_names():
    metrics = Metrics("m")
    metrics.on_preemption()
    assert sample(metrics, "dspark:preemptions_total") == 1
    assert sample(metrics, "vllm:num_preemptions_total") == 1


def test_the_log_line_tells_rates_since_the_last_one():
    now = 0.0
    metrics = Metrics("m", clock=lambda: now)
    assert metrics.log_line() is None
    metrics.set_load(running=2, waiting=1, cache_usage=0.25)
    metrics.on_first_tokens(3, num_prompt_tokens=10, ttft_s=0.2)
    metrics.on_tokens(7, since_last_s=0.1)
    metrics.on_step(drafts())
    now = 2.0
    assert metrics.log_line() == (
        "running 2, waiting 1, cache 25.0 %, prompt 5.0 tok/s, generation 5.0 tok/s, "
        "accepted length 3.00 (by position 1.00 1.00 0.00 0.00 0.00)"
    )
    now = 3.0
    assert "generation 0.0 tok/s" in metrics.log_line()
    metrics.set_load(running=0, waiting=0, cache_usage=0.0)
    assert metrics.log_line() is None


def test_calibration_error_of_hand_counted_bins():
    error = CalibrationError(num_bins=2)
    assert error.value == 0
    confidences = np.array([[0.8, 0.2], [0.6, 0.9]])
    # Row 0: both tried, the second rejected. Row 1: the first rejected, the second not tried.
    error.update(confidences, admitted=np.array([2, 2]), accepted=np.array([1, 0]))
    # Bin over 0.5: 0.8 accepted, 0.6 rejected; bin under: 0.2 rejected.
    assert error.value == pytest.approx(abs(0.8 + 0.6 - 1) / 3 + 0.2 / 3)


def test_calibrated_confidences_have_a_small_error_and_old_drafts_fade():
    rng = np.random.default_rng(0)
    error = CalibrationError(half_life=1000)
    bad = np.full((1000, 1), 0.95)
    error.update(bad, np.ones(1000, int), np.zeros(1000, int))
    assert error.value == pytest.approx(0.95)
    for _ in range(20):
        confidences = rng.random((1000, 1))
        accepted = (rng.random(1000) < confidences[:, 0]).astype(int)
        error.update(confidences, np.ones(1000, int), accepted)
    assert error.value < 0.05


def test_case_12_confidences_that_are_none_count_as_the_allocation_takes_them():
    odd, clean = CalibrationError(), CalibrationError()
    lens = np.array([2, 2]), np.array([1, 2])
    odd.update(np.array([[np.nan, 0.5], [np.inf, -0.5]], np.float32), *lens)
    clean.update(np.array([[0.0, 0.5], [1.0, 0.0]], np.float32), *lens)
    assert odd.value == clean.value > 0
