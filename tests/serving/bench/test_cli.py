"""The command line against a fake server: every key of the result, the report, the exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_jax.serving.bench.cli import main

from .fake_server import PIECES, PROMPT_TOKENS

KEYS = {
    "date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "unfinished", "failure_reasons", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput",
    *(f"{stat}_{metric}_ms" for stat in ("mean", "median", "std", "p99")
      for metric in ("ttft", "tpot", "itl", "e2el")),
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
    "dspark_draft_tokens_admitted", "dspark_draft_tokens_trimmed", "dspark_verify_len",
    "dspark_num_steps", "dspark_verification_budget", "dspark_host_time_ms",
    "dspark_median_host_time_ms",
}  # fmt: skip


def _dataset(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    return path


def _run(server, tmp_path: Path, *flags: str, prompts: list[str] | None = None):
    """Exit status and saved result of a run over these prompts."""
    dataset = _dataset(tmp_path / "prompts.jsonl", prompts or ["ok"])
    common = ["--base-url", server.url, "--disable-tqdm", "--save-result"]
    files = ["--result-dir", str(tmp_path / "out"), "--result-filename", "r.json"]
    data = ["--dataset-name", "custom", "--dataset-path", str(dataset)]
    status = main([*common, *files, *data, *flags])
    return status, json.loads((tmp_path / "out" / "r.json").read_text(encoding="utf-8"))


def test_every_key_and_number(server, tmp_path, capsys):
    server.chunk_delay_s = 0.01
    server.verify_len = 4
    status, result = _run(
        server, tmp_path, "--num-prompts", "6", "--max-concurrency", "2", "--num-warmups", "1"
    )
    assert status == 0
    assert set(result) == KEYS
    tokens, chunks = 10, len(PIECES)
    exact = {
        "backend": "openai", "endpoint_type": "openai", "label": None, "tokenizer_id": None,
        "model_id": "fake/model", "num_prompts": 6, "request_rate": "inf", "burstiness": 1.0,
        "max_concurrency": 2, "completed": 6, "failed": 0, "unfinished": 0, "failure_reasons": {},
        "total_input_tokens": 6 * PROMPT_TOKENS, "total_output_tokens": 6 * tokens,
        # per chunk: 7 drafts scheduled, 4 verified, 2 accepted; warm-up not included
        "spec_decode_num_drafts": 6 * chunks, "spec_decode_draft_tokens": 42 * chunks,
        "spec_decode_accepted_tokens": 12 * chunks,
        "spec_decode_acceptance_rate": pytest.approx(100 * 2 / 7),
        "spec_decode_acceptance_length": 3.0,
        "spec_decode_per_position_acceptance_rates": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        "dspark_draft_tokens_admitted": 24 * chunks, "dspark_draft_tokens_trimmed": 18 * chunks,
        "dspark_verify_len": 4.0, "dspark_num_steps": 6 * chunks,
        "dspark_verification_budget": 4.0, "dspark_host_time_ms": pytest.approx(2.0),
        "dspark_median_host_time_ms": pytest.approx(2.0),
    }  # fmt: skip
    assert {key: result[key] for key in exact} == exact
    duration = result["duration"]
    assert result["request_throughput"] == pytest.approx(6 / duration)
    assert result["output_throughput"] == pytest.approx(6 * tokens / duration)
    assert result["total_token_throughput"] == pytest.approx(6 * (tokens + 5) / duration)
    assert result["mean_ttft_ms"] >= 10
    assert result["mean_itl_ms"] >= 10
    # e2e = first token + 3 gaps per chunk, and the 9 tokens behind the first share those gaps.
    gaps_ms = result["mean_e2el_ms"] - result["mean_ttft_ms"]
    assert gaps_ms == pytest.approx(3 * result["mean_itl_ms"])
    assert gaps_ms == pytest.approx(9 * result["mean_tpot_ms"])
    assert duration >= 3 * result["median_e2el_ms"] / 1e3 * 0.5
    report = capsys.readouterr().out
    assert "Host ms/step outside device, median:     2.000" in report
    assert "Acceptance length:                       3.00" in report
    assert "Accepted at position 1 (%):            100.00" in report


def test_failures_are_counted_and_shown(server, tmp_path, capsys):
    status, result = _run(
        server, tmp_path, "--num-prompts", "6", "--max-concurrency", "1", "--save-detailed",
        prompts=["ok", "http 400", "cut", "error event", "http 400", "ok"],
    )  # fmt: skip
    assert status == 1
    assert (result["completed"], result["failed"]) == (2, 4)
    assert result["total_output_tokens"] == 20
    cut = "connection lost in the middle of the response: closed"
    assert result["failure_reasons"] == {
        "HTTP 400: prompt is too long": 2, cut: 1, "error event: non-finite logits": 1,
    }  # fmt: skip
    assert result["errors"][0] == ""
    assert result["errors"][2] == cut
    assert result["generated_texts"][5] == "".join(PIECES)
    assert result["output_lens"] == [10, 0, 0, 0, 0, 10]
    assert [len(gaps) for gaps in result["itls"]] == [3, 0, 1, 1, 0, 3]
    report = capsys.readouterr().out
    assert "Failed requests:                         4" in report
    assert "2 failed: HTTP 400: prompt is too long" in report


def test_flags_reach_the_wire(server, tmp_path):
    _run(
        server, tmp_path, "--num-prompts", "1", "--backend", "openai-chat", "--model", "a/b",
        "--served-model-name", "b", "--api-key", "secret", "--header", "X-A=1", "--output-len", "7",
        "--temperature", "0.7", "--top-p", "0.9", "--ignore-eos", "--extra-body", '{"seed": 3}',
    )  # fmt: skip
    assert server.bodies == [
        {
            "model": "b", "stream": True, "messages": [{"role": "user", "content": "ok"}],
            "max_completion_tokens": 7, "stream_options": {"include_usage": True},
            "temperature": 0.7, "top_p": 0.9, "ignore_eos": True, "seed": 3,
        }
    ]  # fmt: skip
    head = next(head for head in server.headers if head.startswith("POST"))
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\nX-A: 1\r\n" in head


def test_random_prompts_ignore_eos_and_default_file_name(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = main(
        ["--base-url", server.url, "--num-prompts", "2", "--random-input-len", "3",
         "--random-output-len", "4", "--metadata", "gpu=none", "--max-concurrency", "2",
         "--request-rate", "50", "--save-result", "--disable-tqdm"]
    )  # fmt: skip
    assert status == 0
    assert all(len(body["prompt"]) == 3 and body["ignore_eos"] for body in server.bodies)
    [path] = tmp_path.glob("openai-50.0qps-concurrency2-model-*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["gpu"], result["request_rate"]) == ("none", 50.0)


def test_a_server_without_counters_is_measured_from_outside(server, tmp_path, capsys):
    server.has_metrics = False
    status, result = _run(server, tmp_path, "--num-prompts", "2")
    assert (status, result["completed"]) == (0, 2)
    assert not [key for key in result if key.startswith(("spec_decode", "dspark"))]
    assert result["server_metrics_error"] == "/metrics: HTTP 404"
    assert "No server-side numbers: /metrics: HTTP 404" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dataset-name", "custom"], "--dataset-path goes with"),
        (["--backend", "openai-chat"], "use --backend openai"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1: 0"),
        (["--percentile-metrics", "ttft,foo"], "['foo'] not in"),
        (["--request-rate", "0"], "--request-rate must be positive"),
        (["--metadata", "x"], "expected KEY=VALUE, got 'x'"),
        (["--extra-body", "[1]"], "--extra-body: must be a JSON object"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles must be numbers"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be in [0, 1)"),
        (["--random-token-range", "5", "5"], "--random-token-range is empty"),
        (["sweep", "--no-plots", "--arms", "fixed-9"], "['fixed-9'] not among"),
        (["sweep", "--no-plots", "--", "--port", "1"], "--port: the sweep sets this"),
        (["sweep", "--speculative-config", "{"], "--speculative-config: not JSON"),
        (["sweep", "--no-plots", "--speculative-config", "{}"], '"num_speculative_tokens" must be'),
        (["sweep", "--concurrency", "0"], "--concurrency must be positive"),
    ],
)
def test_bad_flags_are_one_line(flags, reason, capsys):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error


def test_unreachable_server(capsys):
    assert main(["--port", "1", "--random-input-len", "1"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_interrupt_saves_what_is_done(server, tmp_path):
    dataset = _dataset(tmp_path / "prompts.jsonl", ["ok", "ok", "stall", "ok"])
    command = [
        sys.executable, "-m", "dspark_jax.serving.bench", "--base-url", server.url,
        "--dataset-name", "custom", "--dataset-path", str(dataset), "--num-prompts", "4",
        "--max-concurrency", "1", "--save-result", "--result-dir", str(tmp_path),
        "--result-filename", "r.json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    while len(server.bodies) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopping" in err
    assert "Unfinished requests:                     2" in out
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"], result["unfinished"]) == (2, 0, 2)
