"""The large sweep: what is measured, what a second run does, and what the report makes of it."""

from __future__ import annotations

import json

import pytest

from benchmarks.flash_report import captures, draw_pictures, flash_tables, results_of
from benchmarks.flash_store import FlashStore, PointKey
from benchmarks.flash_sweep import Options, plan_points
from benchmarks.report import render
from dspark_jax.serving.bench.arms import make_arms
from dspark_jax.serving.bench.step_metrics import StepTimes
from dspark_jax.serving.config import parse_flags

ARMS = ("none", "fixed-5", "fixed-7", "adaptive")


def options(**changes) -> Options:
    return Options(**({"concurrency": (256, 128, 16), "layers": 30} | changes))


def points(given: Options) -> list[PointKey]:
    arms = make_arms(given.base_speculative_config, given.arms)
    return [key for key, _ in plan_points(given, arms)]


def test_only_points_beyond_a_limit_are_measured_again():
    keys = points(options())
    assert len(keys) == 3 * 4 + 3
    assert [key.arm for key in keys[:4]] == list(ARMS)
    again = {(key.arm, key.concurrency) for key in keys if key.capture == 1024}
    assert again == {(arm, 256) for arm in ("fixed-5", "fixed-7", "adaptive")}
    assert {key.scenario for key in keys} == {"decode"}


def test_the_server_takes_the_command():
    given = options(gpu_memory_utilization=0.92, server_args=("--num-pages", "64"))
    command = given.server_command(8123)
    assert command[1:3] == ["-m", "dspark_jax.serving.serve"]
    config = parse_flags(command[3:])
    assert config.capture_sizes == given.capture_sizes
    assert config.hf_overrides == {
        "num_hidden_layers": 30,
        "dspark_target_layer_ids": [27, 28, 29],
        "dspark_block_size": 7,
    }
    assert config.synthetic_profile is not None
    assert len(config.synthetic_profile.rates) == 7
    assert (config.num_pages, config.gpu_memory_utilization, config.port) == (64, 0.92, 8123)
    assert config.benchmark_policy_endpoint
    assert not config.enable_prefix_caching
    short = parse_flags(options(draft_len=4).server_command(1)[3:]).synthetic_profile
    assert short is not None
    assert len(short.rates) == 4
    assert short.rates[0] == 0.78
    assert short.rates[-1] == pytest.approx(0.09)
    own = parse_flags(options(acceptance="none", load_format="auto").server_command(1)[3:])
    assert own.synthetic_profile is None
    assert not own.skip_tokenizer_init


def result(rate: float, **more) -> dict:
    return {
        "output_throughput": rate,
        "median_tpot_ms": 1000 / rate,
        "duration": 2.0,
        "max_concurrency": 1,
        "steps_by_bucket": [{"bucket": 8, "steps": 100.0, "step_ms": 15.0}],
        **more,
    }


@pytest.fixture
def store(tmp_path) -> FlashStore:
    made = FlashStore.open(tmp_path / "flash.json")
    given = options()
    made.use("decode", given.settings)
    rates = {"none": 100.0, "fixed-5": 150.0, "fixed-7": 120.0, "adaptive": 180.0}
    speculation = {
        "spec_decode_num_drafts": 9,
        "spec_decode_acceptance_length": 3.4,
        "dspark_verification_budget": 70.0,
        "dspark_verify_len": 5.0,
    }
    for key in points(given):
        slower = 0.5 if key.capture == 1024 else 1.0
        more = {} if key.arm == "none" else speculation
        rate = rates[key.arm] * slower
        made.add(key, result(rate, **more) | {"max_concurrency": key.concurrency})
    made.starts.append(
        {
            "scenario": "decode", "date": "2026-11-30T10:00:00", "start_s": 200.0, "command": [], "gpus": ["GPU"],
            "platform": "Linux", "cores": 16, "python": "3.12", "jax": "0.11.2",
            "memory": "x INFO memory in GiB: weights 1.00; 1.00 of 2.00",
            "curves": [{"context_len": 100, "verify": [[1, 5.0], [8, 6.0]], "draft": [[1, 1.0], [4, 2.0]]}],
        }
    )  # fmt: skip
    made.save()
    return made


def test_points_are_kept_and_other_settings_refused(store):
    again = FlashStore.open(store.path)
    assert again.points == store.points
    again.use("decode", options(concurrency=(1,), deadline_s=3.0).settings)
    with pytest.raises(ValueError, match=r"measured with output_len=128, not 64"):
        again.use("decode", options(output_len=64).settings)
    again.use("other", options(output_len=64).settings)
    infinite = options().settings["request_rate"]
    assert json.loads(json.dumps(infinite)) == "inf"


def test_smaller_limits_borrow_the_points_that_are_the_same(store):
    data = json.loads(store.path.read_text())
    assert captures(data, "decode") == [2048, 1024]
    small, full = (results_of(data, "decode", capture) for capture in (1024, 2048))
    assert set(small) == set(full)
    assert small["fixed-7", 256]["output_throughput"] == 60.0
    assert full["fixed-7", 256]["output_throughput"] == 120.0
    # 128 requests with 7 drafts are 1024 tokens: the same programs under both limits.
    assert small["fixed-7", 128] == full["fixed-7", 128]
    assert small["none", 256] == full["none", 256]


def test_the_report_compares_with_what_is_published(store, tmp_path):
    data = json.loads(store.path.read_text())
    text = flash_tables(data)
    assert render(data) == text
    assert "Adaptive at concurrency 256: 0.900 of the best other arm, none." in text
    assert "Adaptive at concurrency 256: 1.200 of the best other arm, fixed-5." in text
    assert "adaptive / fixed-7, Flash, 1024" in text
    assert f"{11155 / 4792:.2f}" in text
    assert f"{9719 / 7609:.2f}" in text
    assert "up after 200 s; GPU, 16 cores, Python 3.12, jax 0.11.2. weights 1.00" in text
    # 100 steps of 15 ms in 2 s.
    assert "0.25" in text
    paths = draw_pictures(data, tmp_path / "pictures")
    assert [path.name for path in paths] == [
        "flash_decode_cost.png",
        "flash_decode_2048_pareto.png",
        "flash_decode_2048_budget.png",
        "flash_decode_1024_pareto.png",
        "flash_decode_1024_budget.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_one_concurrency_makes_no_picture(store, tmp_path):
    data = json.loads(store.path.read_text())
    data["flash_points"] = [p for p in data["flash_points"] if p["concurrency"] == 256]
    assert "pareto" not in flash_tables(data)
    assert [path.name for path in draw_pictures(data, tmp_path)] == ["flash_decode_cost.png"]


def test_step_times_are_differences():
    page = """# TYPE dspark:step_ms histogram
dspark:step_ms_count{{bucket="8"}} {0}
dspark:step_ms_sum{{bucket="8"}} {1}
dspark:step_ms_count{{bucket="16"}} 3.0
dspark:step_ms_sum{{bucket="16"}} 9.0
# TYPE dspark:predicted_step_ms histogram
dspark:predicted_step_ms_count{{bucket="8"}} {0}
dspark:predicted_step_ms_sum{{bucket="8"}} {2}
"""
    before = StepTimes.parse(page.format("1.0", "5.0", "4.0"))
    after = StepTimes.parse(page.format("5.0", "45.0", "24.0"))
    expected = [{"bucket": 8, "steps": 4.0, "step_ms": 10.0, "predicted_ms": 5.0}]
    assert after.since(before) == expected
