"""The command line: what it reads, what it refuses, and how."""

import dataclasses
import subprocess
import sys
import time

import pytest

from dspark_jax.config import ConfigError, DraftConfig
from dspark_jax.serving.config import ServeConfig, parse_flags
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.speculative_config import (
    SpeculativeConfig,
    parse_speculative_config,
    to_json,
)
from dspark_jax.serving.synthetic_profile import SyntheticProfile, parse_profile, profile_to_json
from tests.serving.fake_engine import MODEL_CONFIG

SYNTHETIC = '{"rejection_sample_method": "synthetic"}'
DRAFT = DraftConfig(block_size=7, noise_token_id=2, target_layer_ids=(0,), markov_rank=4)
WITH_DRAFTER = dataclasses.replace(MODEL_CONFIG, draft=DRAFT)


def test_flags_of_vllm_are_read(monkeypatch):
    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    config = parse_flags(
        [
            "--model", "folder", "--served-model-name", "m", "--host", "0.0.0.0", "--port=9",
            "--max-model-len", "100", "--max_num_seqs", "4", "--max-num-batched-tokens", "64",
            "--seed", "5", "--api-key", "k", "--kv-cache-dtype", "fp8", "--dtype", "bfloat16",
            "--compilation-config", '{"max_cudagraph_capture_size": 32}',
            "--num-gpu-blocks-override", "10", "--disable-log-stats", "--bucket-ladder", "vllm",
            "--pipeline-parallel-size", "1", "--profile-context-len", "77", "--no-profile-cache",
            "--per-request-spec-decode-metrics", "--compilation-cache-dir", "cache",
            "--no-enable-prefix-caching",
            "--speculative-config",
            '{"method": "dspark", "num_speculative_tokens": 7, "target_token_ms": 5,'
            ' "enable_adaptive_verification": true, "rejection_sample_method": "coupled"}',
        ]
    )  # fmt: skip
    assert (str(config.model), config.served_model_name, config.port) == ("folder", "m", 9)
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (
        100,
        4,
        64,
    )
    assert (config.capture_tokens, config.num_pages, config.bucket_ladder) == (32, 10, "vllm")
    assert (config.api_key, config.kv_cache_dtype, config.dtype) == ("k", "fp8", "bfloat16")
    assert config.disable_log_stats
    assert config.no_profile_cache
    assert config.per_request_spec_decode_metrics
    assert config.speculative_config == SpeculativeConfig(
        num_speculative_tokens=7,
        target_token_ms=5,
        enable_adaptive_verification=True,
        rejection_sample_method="coupled",
    )
    assert not config.enable_prefix_caching
    assert parse_flags(["--max-capture-tokens", "9"]).capture_tokens == 9


@pytest.mark.parametrize(
    ("flags", "num_snapshots"),
    [
        ([], ServeConfig().num_prefix_snapshots),
        (["--enable-prefix-caching", "--num-prefix-snapshots", "5"], 5),
        (["--no-enable-prefix-caching", "--num-prefix-snapshots", "5"], 0),
        (["--num-prefix-snapshots", "0"], 0),
    ],
)
def test_prefixes_are_cached_unless_that_is_switched_off(flags, num_snapshots):
    assert parse_flags(flags).num_snapshots == num_snapshots


def test_flags_for_benchmarks_are_read():
    config = parse_flags(
        [
            "--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}', "--skip-tokenizer-init",
            "--gpu-memory-utilization", "0.8", "--benchmark-policy-endpoint",
            "--compilation-config", '{"cudagraph_capture_sizes": [1, 4, 8]}',
            "--benchmark-synthetic-acceptance", '{"request_spread": 0.1, "miscalibration": 2}',
            "--speculative-config",
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.5]}',
        ]
    )  # fmt: skip
    assert (config.load_format, config.hf_overrides) == ("dummy", {"num_hidden_layers": 2})
    assert config.skip_tokenizer_init
    assert config.benchmark_policy_endpoint
    assert (config.gpu_memory_utilization, config.capture_sizes) == (0.8, (1, 4, 8))
    assert config.capture_tokens is None
    assert config.synthetic_profile == SyntheticProfile(
        rates=(0.9, 0.5), request_spread=0.1, miscalibration=2
    )
    assert parse_profile(profile_to_json(config.synthetic_profile)) == config.synthetic_profile
    with pytest.raises(FlagError, match="has 2 rates, the drafter 7 positions"):
        config.check(WITH_DRAFTER)
    default = parse_flags(
        ["--benchmark-synthetic-acceptance", "default", "--speculative-config", SYNTHETIC]
    )
    default.check(WITH_DRAFTER)
    assert default.synthetic_profile == SyntheticProfile()
    assert default.synthetic_profile.rates[0] > 0.7
    assert default.synthetic_profile.rates[-1] < 0.1


def test_defaults_serve_the_bundled_model_without_speculation(monkeypatch):
    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    config = parse_flags([])
    assert config == ServeConfig()
    assert config.model_folder.parts[-2:] == ("dspark_jax", "bundled")
    assert config.speculative_config is None


def test_the_key_may_come_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("DSPARK_API_KEY", "from-environment")
    assert parse_flags([]).api_key == "from-environment"
    assert parse_flags(["--api-key", "given"]).api_key == "given"
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    assert "from-environment" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-lora"], "merge them into the checkpoint"),
        (["--lora-modules", "a=b"], "merge them into the checkpoint"),
        (["--pipeline-parallel-size", "2"], "leave the flag out"),
        (["-pp", "2"], "leave the flag out"),
        (["--decode-context-parallel-size", "2"], "leave the flag out"),
        (["--enforce-eager"], "every step runs a compiled program"),
        (["--guided-decoding-backend", "xgrammar"], "structured output is not supported"),
        (["--max-model-lenn", "3"], "did you mean --max-model-len?"),
        (["--qqqqqq"], "--help lists the flags"),
        (["folder"], "goes to --model"),
        (["--speculative-config", "{"], "--speculative-config: not JSON"),
        (["--speculative-config", "[]"], "must be a JSON object"),
        (["--speculative-config", '{"k": 1}'], "unknown key 'k'; known are method"),
        (["--speculative-config", '{"method": "eagle"}'], "must be one of dspark"),
        (["--speculative-config", '{"min_depth": true}'], "must be an integer, got true"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "at least 1"),
        (
            ["--speculative-config", '{"min_depth": 1}'],
            "min_depth needs enable_adaptive_verification",
        ),
        (
            ["--speculative-config", '{"target_token_ms": 5}'],
            "target_token_ms needs enable_adaptive_verification",
        ),
        (
            ["--speculative-config", '{"confidence_smoothing": 0.8}'],
            "confidence_smoothing needs enable_adaptive_verification",
        ),
        (["--speculative-config", '{"confidence_smoothing": 0}'], "must lie in (0, 1]"),
        (["--speculative-config", '{"hysteresis": 1}'], "hysteresis must lie in [0, 1)"),
        (["--compilation-config", '{"level": 3}'], "unknown key 'level'"),
        (
            [
                "--max-capture-tokens",
                "8",
                "--compilation-config",
                '{"max_cudagraph_capture_size": 9}',
            ],
            "leave one of them out",
        ),
        (
            ["--compilation-config", '{"cudagraph_capture_sizes": [4, 2]}'],
            "positive and increasing",
        ),
        (
            [
                "--max-capture-tokens",
                "8",
                "--compilation-config",
                '{"cudagraph_capture_sizes": [8]}',
            ],
            "leave one of them out",
        ),
        (["--hf-overrides", "7"], "--hf-overrides: must be a JSON object"),
        (["--gpu-memory-utilization", "1.5"], "must lie in (0, 1]"),
        (["--speculative-config", SYNTHETIC], "add --benchmark-synthetic-acceptance default"),
        (
            ["--benchmark-synthetic-acceptance", "default"],
            'needs "rejection_sample_method": "synthetic"',
        ),
        (
            ["--benchmark-synthetic-acceptance", "default", "--speculative-config", "{}"],
            'needs "rejection_sample_method": "synthetic"',
        ),
        (
            ["--benchmark-synthetic-acceptance", '{"rates": [0.2, 0.3]}'],
            "rates are chances that the first k drafts are all accepted and cannot rise",
        ),
        (["--benchmark-synthetic-acceptance", '{"rates": 1}'], "rates must be a list of numbers"),
        (["--benchmark-synthetic-acceptance", '{"request_spread": 1}'], "must lie in [0, 1)"),
        (
            ["--benchmark-synthetic-acceptance", '{"request_spread": 0.6, "round_spread": 0.5}'],
            "leave nothing to chance",
        ),
        (["--benchmark-synthetic-acceptance", '{"miscalibration": 0}'], "must be positive"),
        (["--benchmark-synthetic-acceptance", '{"a": 1}'], "unknown key 'a'; known are"),
        (
            ["--speculative-config", '{"synthetic_acceptance_rates": [0.5]}'],
            'synthetic_acceptance_rates needs "rejection_sample_method": "synthetic"',
        ),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (
            ["--max-num-batched-tokens", "5", "--max-num-seqs", "6"],
            "raise the former or lower the latter",
        ),
        (["--port", "70000"], "--port must lie in"),
        (["--seed", "-1"], "--seed must lie in"),
        (["--num-prefix-snapshots", "-1"], "--num-prefix-snapshots must not be negative, got -1"),
        (["--api-key", ""], "--api-key must not be empty"),
    ],
)
def test_refusals_are_one_line_that_names_the_remedy(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_flags(flags)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("fields", "model", "message"),
    [
        ({"max_model_len": 257}, MODEL_CONFIG, "use at most 256"),
        ({"speculative_config": SpeculativeConfig()}, MODEL_CONFIG, "has no DSpark drafter"),
        (
            {"speculative_config": SpeculativeConfig(num_speculative_tokens=5)},
            WITH_DRAFTER,
            "use 7, and fixed_verify_len to verify fewer",
        ),
        (
            {"speculative_config": SpeculativeConfig(fixed_verify_len=8)},
            WITH_DRAFTER,
            "exceeds the draft length 7",
        ),
        (
            {
                "speculative_config": SpeculativeConfig(),
                "max_num_seqs": 4,
                "max_num_batched_tokens": 7,
            },
            WITH_DRAFTER,
            "use at least 8",
        ),
    ],
)
def test_what_the_checkpoint_cannot_do_is_refused(fields, model, message):
    with pytest.raises(FlagError, match=message):
        ServeConfig(**fields).check(model)
    ServeConfig().check(model)


def test_speculative_config_survives_its_json():
    for config in (SpeculativeConfig(), SpeculativeConfig(fixed_verify_len=0, hysteresis=0.5)):
        assert parse_speculative_config(to_json(config)) == config
    with pytest.raises(ConfigError, match="exclude each other"):
        SpeculativeConfig(fixed_verify_len=3, enable_adaptive_verification=True)


def test_help_is_quick_and_loads_no_jax():
    code = (
        "import sys\n"
        "from dspark_jax.serving.serve import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'jax', 'flax', 'fastapi', 'uvicorn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert time.perf_counter() - begin < 10  # two seconds on an idle machine
