"""The sweep against fake servers that it starts itself."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_jax.serving.bench.arms import arm_rank, make_arms
from dspark_jax.serving.bench.cli import main
from dspark_jax.serving.bench.store import SweepStore, median_result

SERVER = (
    f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('fake_server.py')))}"
)
BASE = {"method": "dspark", "num_speculative_tokens": 2}
PNG = b"\x89PNG\r\n\x1a\n"


def _flags(tmp_path: Path, *flags: str, prompts: tuple[str, ...] = ("ok",)) -> list[str]:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    return [
        "sweep", "--server-command", SERVER, "--result-dir", str(tmp_path / "out"),
        "--dataset-name", "custom", "--dataset-path", str(dataset), "--num-prompts", "4",
        "--num-warmups", "1", "--concurrency", "1", "2", "--disable-tqdm",
        "--speculative-config", json.dumps(BASE), *flags,
        "--", "--record", str(tmp_path / "record"), "--chunk-delay", "0.002",
    ]  # fmt: skip


def _record(tmp_path: Path) -> list[dict | None]:
    """Speculative configs of the servers that were started, in order."""
    return [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]


def _saved(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "sweep.json").read_text(encoding="utf-8"))


def test_arms_draft_the_whole_block():
    full = {**BASE, "enable_adaptive_verification": False}
    assert [(arm.name, arm.speculative_config) for arm in make_arms(BASE)] == [
        ("none", None),
        ("fixed-1", {**full, "fixed_verify_len": 1}),
        ("fixed-2", full),
        ("adaptive", {**BASE, "enable_adaptive_verification": True}),
    ]
    assert [arm.name for arm in make_arms(BASE, ("adaptive", "none"))] == ["adaptive", "none"]
    names = ["adaptive", "fixed-10", "other", "none", "fixed-2"]
    assert sorted(names, key=arm_rank) == ["none", "fixed-2", "fixed-10", "adaptive", "other"]


def test_full_sweep(tmp_path):
    assert main(_flags(tmp_path, "--repeats", "2")) == 0
    assert _record(tmp_path) == [arm.speculative_config for arm in make_arms(BASE)]
    saved = _saved(tmp_path)
    assert saved["arm_errors"] == {}
    assert saved["settings"]["speculative_config"] == json.dumps(BASE)
    assert {"api_key", "header"}.isdisjoint(saved["settings"])
    assert [(p["arm"], p["concurrency"], len(p["repeats"])) for p in saved["points"]] == [
        (arm.name, c, 2) for arm in make_arms(BASE) for c in (1, 2)
    ]
    for point in saved["points"]:
        summary = point["summary"]
        assert (summary["completed"], summary["failed"]) == (4, 0)
        assert summary["max_concurrency"] == point["concurrency"]
        rates = sorted(r["output_throughput"] for r in point["repeats"])
        assert summary["output_throughput_range"] == rates
        assert summary["output_throughput"] == pytest.approx(sum(rates) / 2)
    verify_lens = {p["arm"]: p["summary"]["dspark_verify_len"] for p in saved["points"]}
    # The fake server takes 7 and 4 for what has no fixed length.
    assert verify_lens == {"none": 7, "fixed-1": 1, "fixed-2": 7, "adaptive": 4}
    table = (tmp_path / "out" / "sweep.md").read_text(encoding="utf-8").splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == 2 * [a.name for a in make_arms(BASE)]
    assert table[2].rstrip(" |").endswith("+0.0 %")
    for name in ("pareto.png", "speculation.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(PNG)


def test_resume_adds_only_what_is_missing(tmp_path, capsys):
    arms = ("--no-plots", "--arms", "none", "adaptive")
    assert main(_flags(tmp_path, *arms)) == 0
    first = _saved(tmp_path)["points"]
    assert main(_flags(tmp_path, *arms)) == 0
    assert _saved(tmp_path)["points"] == first
    assert len(_record(tmp_path)) == 2
    assert main(_flags(tmp_path, "--no-plots", "--arms", "adaptive", "--repeats", "2")) == 0
    points = _saved(tmp_path)["points"]
    assert len(_record(tmp_path)) == 3
    assert [len(p["repeats"]) for p in points] == [1, 1, 2, 2]
    assert [p["repeats"][0] for p in points] == [p["repeats"][0] for p in first]

    # Other settings are refused rather than mixed; --overwrite starts anew.
    capsys.readouterr()
    other = _flags(
        tmp_path, "--no-plots", "--output-len", "9", "--arms", "none", "--concurrency", "1"
    )
    assert main(other) == 1
    assert "output_len=None, not 9" in capsys.readouterr().err
    assert main([*other[: other.index("--")], "--overwrite", *other[other.index("--") :]]) == 0
    assert [(p["arm"], len(p["repeats"])) for p in _saved(tmp_path)["points"]] == [("none", 1)]


def test_overwrite_measures_only_the_chosen_points_anew(tmp_path):
    flags = ("--no-plots", "--arms", "none", "adaptive")
    assert main(_flags(tmp_path, *flags)) == 0
    before = {(p["arm"], p["concurrency"]): p["repeats"] for p in _saved(tmp_path)["points"]}
    assert main(_flags(tmp_path, "--no-plots", "--arms", "none", "--overwrite")) == 0
    after = {(p["arm"], p["concurrency"]): p["repeats"] for p in _saved(tmp_path)["points"]}
    assert set(after) == set(before)
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {("none", 1), ("none", 2)}
    assert all(len(repeats) == 1 for repeats in after.values())


def test_interleaved_arms_alternate(tmp_path):
    flags = ("--no-plots", "--interleave", "--repeats", "2", "--arms", "none", "adaptive")
    assert main(_flags(tmp_path, *flags)) == 0
    points = _saved(tmp_path)["points"]
    # Points appear in the order of their first measurement.
    assert [(p["arm"], p["concurrency"]) for p in points] == [
        ("none", 1), ("adaptive", 1), ("none", 2), ("adaptive", 2),
    ]  # fmt: skip
    assert [len(p["repeats"]) for p in points] == [2, 2, 2, 2]


def test_small_concurrencies_may_send_fewer(tmp_path):
    assert main(_flags(tmp_path, "--no-plots", "--arms", "none", "--prompts-per-stream", "2")) == 0
    assert [p["summary"]["num_prompts"] for p in _saved(tmp_path)["points"]] == [2, 4]


def test_points_of_few_requests_have_enough_prompts(tmp_path):
    flags = ["--arms", "none", "--prompts-per-stream", "1", "--min-prompts", "3"]
    assert main(_flags(tmp_path, "--no-plots", *flags)) == 0
    assert [p["summary"]["num_prompts"] for p in _saved(tmp_path)["points"]] == [3, 3]


def test_a_broken_arm_is_reported_and_the_others_measured(tmp_path, capsys):
    flags = _flags(tmp_path, "--no-plots", "--arms", "fixed-1", "adaptive")
    assert main([*flags, "--broken-arm", "1"]) == 1
    saved = _saved(tmp_path)
    assert {p["arm"] for p in saved["points"]} == {"adaptive"}
    reason = "exited with status 1: out of memory: lower --max-num-seqs"
    assert saved["arm_errors"] == {"fixed-1": reason}
    assert f"* fixed-1: {reason}" in (tmp_path / "out" / "sweep.md").read_text(encoding="utf-8")
    assert f"fixed-1: {reason}" in capsys.readouterr().err


def test_a_server_that_dies_ends_its_arm_and_keeps_finished_points(tmp_path):
    # A warm-up and four requests for each point; the server dies at the third of the second point.
    flags = _flags(tmp_path, "--no-plots", "--arms", "adaptive")
    assert main([*flags, "--exit-after", "8"]) == 1
    saved = _saved(tmp_path)
    assert [(p["arm"], p["concurrency"]) for p in saved["points"]] == [("adaptive", 1)]
    reason = saved["arm_errors"]["adaptive"]
    # The other request in flight may or may not have had its last bytes.
    assert re.fullmatch(
        r"at concurrency 2: server exited with status 3, [23] of 4 .* failed", reason
    )


def test_failed_requests_stay_in_the_results(tmp_path):
    flags = _flags(tmp_path, "--no-plots", "--arms", "none", prompts=("ok", "cut"))
    assert main(flags) == 1
    for point in _saved(tmp_path)["points"]:
        assert (point["summary"]["completed"], point["summary"]["failed"]) == (2, 2)


def test_interrupt_keeps_points_and_stops_servers(tmp_path):
    flags = _flags(tmp_path, "--no-plots", "--arms", "none", "adaptive", prompts=("ok", "ok"))
    flags = [*flags, "--chunk-delay", "0.05"]
    flags[flags.index("--concurrency") + 1 : flags.index("--disable-tqdm")] = ["2", "1"]
    process = subprocess.Popen([sys.executable, "-m", "dspark_jax.serving.bench", *flags])
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "out" / "sweep.json").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 1
    points = _saved(tmp_path)["points"]
    assert [(p["arm"], p["concurrency"]) for p in points] == [("none", 2)]
    assert len(_record(tmp_path)) == 1
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in listing.stdout


def test_pictures_need_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(_flags(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "dspark-jax[notebooks]" in error
    assert not (tmp_path / "record").exists()


def test_median_result():
    first = {"model_id": "m", "output_throughput": 5.0, "failed": 0, "n": 4, "rates": [0.5, 0.25],
             "failure_reasons": {}, "p99": None}  # fmt: skip
    second = {**first, "output_throughput": 9.0, "failed": 2, "n": 6, "rates": [0.7, 0.35],
              "failure_reasons": {"cut": 2}}  # fmt: skip
    third = {**first, "output_throughput": 6.0, "failed": 1, "n": 5, "rates": [0.6, 0.15],
             "failure_reasons": {"cut": 1}, "p99": 3.0}  # fmt: skip
    assert median_result([first, second, third]) == {
        "model_id": "m", "output_throughput": 6.0, "failed": 3, "n": 5, "rates": [0.6, 0.25],
        "failure_reasons": {"cut": 3}, "p99": 3.0, "output_throughput_range": [5.0, 9.0],
    }  # fmt: skip


def test_store_survives_a_crash_while_saving(tmp_path, monkeypatch):
    path = tmp_path / "sweep.json"
    store = SweepStore.open(path, {"a": (1, 2)}, {})
    store.add("none", 1, {"output_throughput": 1.0, "failed": 0})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.add("none", 2, {"output_throughput": 1.0, "failed": 0})
    monkeypatch.undo()
    again = SweepStore.open(path, {"a": (1, 2)}, {})
    assert list(again.repeats) == [("none", 1)]
    with pytest.raises(ValueError, match=r"measured with a=\[1, 2\], not \[1, 3\]"):
        SweepStore.open(path, {"a": (1, 3)}, {})
