"""Profile plan, statistics of the runs, storage."""

import json
import logging

import numpy as np
import pytest

from dspark_jax.budget import (
    CostTable,
    ProfileSample,
    curves_from_samples,
    load_profile,
    profile_plan,
    resolve_context_len,
    save_profile,
)

KEY = {"model": "a1b2", "buckets": (8, 16), "device_kind": "cpu", "versions": {"jax": "0.10.2"}}


def sample(num_tokens, verify_ms, *, num_requests=1, draft_ms=1.0, is_captured=True):
    return ProfileSample(
        num_tokens=num_tokens,
        num_requests=num_requests,
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        is_captured=is_captured,
    )


@pytest.fixture
def curves():
    rng = np.random.default_rng(5)
    samples = [sample(t, rng.uniform(1, 9), draft_ms=rng.uniform(0, 1)) for t in (8, 16) * 5]
    return (curves_from_samples(samples, 100), curves_from_samples(samples[:4], 200))


def test_case_15_shapes_of_a_sparse_capture():
    plan = profile_plan([1024, 8], max_tokens=4096, max_requests=256, draft_len=7)
    assert [shape.num_tokens for shape in plan] == [8, 1024, 1536, 2048, 4096]
    assert [shape.is_captured for shape in plan] == [True, True, False, False, False]
    assert [shape.num_requests for shape in plan] == [1, 128, 192, 256, 256]
    assert {shape.num_runs for shape in plan} == {5}


def test_case_15_draft_curve_from_captured_samples_only():
    plan = profile_plan([8, 1024], max_tokens=4096, max_requests=256, draft_len=7)
    samples = [
        sample(s.num_tokens, 1.0, num_requests=s.num_requests, is_captured=s.is_captured)
        for s in plan
        for _ in range(s.num_runs)
    ]
    curves = curves_from_samples(samples, 8192)
    assert sorted(curves.verify) == [8, 1024, 1536, 2048, 4096]
    assert sorted(curves.draft) == [1, 128]


def test_published_ladder_takes_440_runs():
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    plan = profile_plan(ladder, max_tokens=16384, max_requests=256, draft_len=7)
    assert len(ladder) == 83
    assert sum(shape.num_runs for shape in plan) == 440
    assert [s.num_tokens for s in plan if not s.is_captured] == [1536, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize(
    ("captured", "max_tokens", "tail"),
    [([8, 16], 16, []), ([8, 16], 20, [20]), ([16], 40, [24, 32, 40]), ([16], 32, [24, 32])],
)
def test_tail_is_clamped_to_the_largest_step(captured, max_tokens, tail):
    plan = profile_plan(captured, max_tokens=max_tokens, max_requests=4, draft_len=7)
    assert [s.num_tokens for s in plan] == captured + tail


@pytest.mark.parametrize("captured", [[], [0, 8], [8, 64]])
def test_plan_refuses_impossible_captures(captured):
    with pytest.raises(ValueError):
        profile_plan(captured, max_tokens=32, max_requests=4, draft_len=7)


def test_case_20_first_run_outlier_does_not_matter():
    samples = [sample(8, ms) for ms in (30.0, 3.0, 3.1, 2.9, 3.0)]
    samples += [sample(16, ms, num_requests=2, draft_ms=ms / 10) for ms in (50.0, 5.0, 5, 5.2, 4.9)]
    curves = curves_from_samples(samples, 8192)
    assert curves.verify == {8: 3.0, 16: 5.0}
    assert curves.draft == {1: 1.0, 2: 0.5}


def test_uncaptured_samples_alone_are_no_draft_curve():
    with pytest.raises(ValueError, match="enable_adaptive_verification"):
        curves_from_samples([sample(8, 1.0, is_captured=False)], 8192)


def test_case_20_tables_from_broadcast_curves_equal_bit_for_bit(tmp_path, curves):
    save_profile(tmp_path / "profile.json", curves, KEY)
    received = load_profile(tmp_path / "profile.json", KEY)
    tables = [CostTable(c, max_tokens=64, max_requests=4) for c in (curves, received)]
    ours, theirs = (t.steps_ms(0, 64, 3, draft=True, context_len=137.0).tobytes() for t in tables)
    assert ours == theirs
    assert received == curves


@pytest.mark.parametrize("ms", [-1.0, float("nan")])
def test_impossible_times_are_refused(ms):
    with pytest.raises(ValueError, match="finite"):
        curves_from_samples([sample(8, ms)], 8192)


@pytest.mark.parametrize(
    ("field", "value"), [("device_kind", "NVIDIA H200"), ("buckets", (8,)), ("versions", {})]
)
def test_another_key_is_ignored_with_one_line(tmp_path, caplog, curves, field, value):
    save_profile(tmp_path / "profile.json", curves, KEY)
    with caplog.at_level(logging.WARNING):
        assert load_profile(tmp_path / "profile.json", KEY | {field: value}) is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"{field} is " in message
    assert "\n" not in message


def test_a_field_missing_in_the_stored_key_is_a_difference(tmp_path, caplog, curves):
    save_profile(tmp_path / "profile.json", curves, KEY)
    assert load_profile(tmp_path / "profile.json", KEY | {"quantised": True}) is None
    assert "quantised" in caplog.text


def damage_times(document):
    document["curves"][0]["verify"][0][1] = float("nan")


def damage_curves(document):
    document["curves"] = []


def damage_entry(document):
    del document["curves"][0]["draft"]


@pytest.mark.parametrize("damage", [damage_times, damage_curves, damage_entry])
def test_damaged_documents_are_ignored_with_one_line(tmp_path, caplog, curves, damage):
    path = tmp_path / "profile.json"
    save_profile(path, curves, KEY)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    assert load_profile(path, KEY) is None
    assert len(caplog.records) == 1
    assert "unreadable" in caplog.text


@pytest.mark.parametrize("text", ["", '{"key": {', "[]", '{"key": 3}', "null", "\x80"])
def test_corrupt_files_are_ignored_with_one_line(tmp_path, caplog, text):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    assert load_profile(path, KEY) is None
    assert len(caplog.records) == 1
    assert "unreadable" in caplog.text


def test_no_file_is_no_profile(tmp_path, caplog):
    assert load_profile(tmp_path / "absent.json", KEY) is None
    assert not caplog.records


def test_saving_replaces_and_leaves_nothing_else(tmp_path, curves):
    path = tmp_path / "cache" / "profile.json"
    save_profile(path, curves, KEY)
    save_profile(path, curves[:1], KEY)
    assert load_profile(path, KEY) == curves[:1]
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


DSPARK = "DSPARK_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
VLLM = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"


@pytest.mark.parametrize(
    ("flag", "environ", "max_model_len", "expected"),
    [
        (None, {}, 65536, 8192),
        (None, {}, 4096, 4096),
        (512, {DSPARK: "7", VLLM: "8"}, 4096, 512),
        (None, {DSPARK: "700", VLLM: "800"}, 4096, 700),
        (None, {VLLM: "800"}, 4096, 800),
        (None, {VLLM: "99999"}, 4096, 4096),
    ],
)
def test_context_len(flag, environ, max_model_len, expected):
    assert resolve_context_len(flag, environ, max_model_len) == expected


@pytest.mark.parametrize(
    ("flag", "environ", "source"),
    [(0, {}, "--profile-context-len"), (None, {VLLM: "8k"}, VLLM), (None, {DSPARK: "-1"}, DSPARK)],
)
def test_context_len_errors_name_their_source(flag, environ, source):
    with pytest.raises(ValueError, match=source):
        resolve_context_len(flag, environ, 4096)
