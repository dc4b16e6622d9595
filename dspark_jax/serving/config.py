"""The server's flags. Named as `vllm serve` names them where they mean the same; imports no JAX."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from dspark_jax.config import ConfigError, ModelConfig
from dspark_jax.serving.buckets import Ladder
from dspark_jax.serving.compilation_config import (
    CompilationConfig,
    compilation_to_json,
    parse_compilation_config,
)
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.json_object import json_object
from dspark_jax.serving.speculative_config import (
    SpeculativeConfig,
    parse_speculative_config,
    to_json,
)
from dspark_jax.serving.synthetic_profile import (
    SyntheticProfile,
    parse_profile,
    profile_to_json,
)

_API_KEY_VARIABLE = "DSPARK_API_KEY"
_DEFAULT_MODEL_NAME = "dspark"
# Flags of vLLM that cannot be honoured: the values that ask for nothing, and the remedy.
_REFUSED = {
    "--enable-lora": ((), "LoRA adapters are not supported; merge them into the checkpoint"),
    "--lora-modules": ((), "LoRA adapters are not supported; merge them into the checkpoint"),
    "--pipeline-parallel-size": (
        ("1",),
        "pipeline parallelism is not supported: confidences and drafts live with the last layer; "
        "leave the flag out",
    ),
    "--decode-context-parallel-size": (
        ("1",),
        "context parallelism is not supported; leave the flag out",
    ),
    "--enforce-eager": ((), "every step runs a compiled program; leave the flag out"),
    "--guided-decoding-backend": ((), "structured output is not supported; leave the flag out"),
}
_ALIASES = {
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "--num-gpu-blocks-override": "--num-pages",
}


def _json_flag(flag: str, parse: Callable[[str], Any], to_text: Callable[[Any], str]) -> Any:
    def from_args(args: list[str]) -> Any:
        try:
            return parse(args[0])
        except ConfigError as error:
            raise FlagError(f"{flag}: {error}") from error

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=from_args,
        is_instance=lambda value: True,
        str_from_instance=lambda value: ["none" if value is None else to_text(value)],
    )


# A flag that only switches something on.
Switch = tyro.conf.FlagCreatePairsOff[bool]


class DeviceLimits(NamedTuple):
    """How large the steps of a server are."""

    max_num_seqs: int
    max_num_batched_tokens: int
    bucket_ladder: Ladder


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """OpenAI-compatible server for DeepSeek-V4 with DSpark drafting and adaptive verification."""

    model: Path | None = None
    """Checkpoint folder; the small model that ships with the package if left out."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads the checkpoint's tensors; dummy makes random ones of the same storage, for benchmarks: then
    config.json is all that the folder must hold."""
    hf_overrides: Annotated[
        dict[str, Any] | None, _json_flag("--hf-overrides", json_object, json.dumps)
    ] = None
    """Keys of config.json to replace, for example {"num_hidden_layers": 8}."""
    skip_tokenizer_init: Switch = False
    """Need no tokenizer: prompts are token ids, and replies have no text."""
    served_model_name: str = _DEFAULT_MODEL_NAME
    """Name under which clients ask for the model."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str | None = None
    """Key that clients must send as a bearer token; default: the variable DSPARK_API_KEY."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; default: the checkpoint's."""
    max_num_seqs: int | None = None
    """Most requests in one step; default 256 on a GPU, 64 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; default 2048 on a GPU, 256 on a CPU."""
    seed: int = 0
    """Seed from which requests without one draw theirs."""
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _json_flag("--speculative-config", parse_speculative_config, to_json),
    ] = None
    """Drafting and verification, for example
    {"method": "dspark", "enable_adaptive_verification": true}; ordinary decoding if left out."""
    max_capture_tokens: int | None = None
    """Tokens up to which step sizes are fine; default: (draft length + 1) x max_num_seqs."""
    compilation_config: Annotated[
        CompilationConfig | None,
        _json_flag("--compilation-config", parse_compilation_config, compilation_to_json),
    ] = None
    """Step sizes as vLLM takes them: {"max_cudagraph_capture_size": N} is --max-capture-tokens N, and
    {"cudagraph_capture_sizes": [...]} lists them instead of a ladder."""
    bucket_ladder: Literal["auto", "default", "doubling", "vllm"] = "auto"
    """Step sizes that are compiled: default is fine-grained, doubling has few; auto is default on a GPU and
    doubling on a CPU."""
    profile_context_len: int | None = None
    """Synthetic context of the cost profile; default 8192, or the variable
    DSPARK_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN."""
    no_profile_cache: Switch = False
    """Measure the cost profile anew and don't store it."""
    compilation_cache_dir: Path | None = None
    """Folder for compiled programs and cost profiles; default: the user's cache folder."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic; auto is bfloat16 on a GPU and float32 on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8", "bfloat16", "float32"] = "auto"
    """How cache rows are stored. bfloat16 and float32 are plain. fp8 rounds rows as the released model does, to
    e4m3 in blocks of 64 channels, and indexer keys too; they take 57 % of bfloat16's memory. auto rounds rows
    alike but stores bfloat16, which attention reads faster; with float32 arithmetic it is float32."""
    num_pages: int | None = None
    """Cache pages; default: what fits. Also --num-gpu-blocks-override."""
    enable_prefix_caching: bool = True
    """Keep cache pages of finished requests, and start behind those that a prompt shares with an earlier one.
    Prompts with prompt_logprobs are fed in full."""
    num_prefix_snapshots: int = 32
    """Prefixes that prompts can start behind; each takes memory for the part of a cache that is in no page. 0 does
    as --no-enable-prefix-caching."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that this process takes; default 0.9, or the variable
    XLA_PYTHON_CLIENT_MEM_FRACTION."""
    benchmark_synthetic_acceptance: Annotated[
        SyntheticProfile | None,
        _json_flag("--benchmark-synthetic-acceptance", parse_profile, profile_to_json),
    ] = None
    """Let "rejection_sample_method": "synthetic" accept drafts by chance, after this profile: default, or a JSON
    object of rates, request_spread, round_spread and miscalibration. The text is not the model's."""
    benchmark_policy_endpoint: Switch = False
    """Answer POST /benchmark/policy, which changes the verification policy of a server without requests."""
    per_request_spec_decode_metrics: Switch = False
    """Add a field metrics.speculative_decoding to responses."""
    disable_log_stats: Switch = False
    """No periodic log line."""

    def __post_init__(self) -> None:
        positive = (
            "max_model_len max_num_seqs max_num_batched_tokens max_capture_tokens "
            "profile_context_len num_pages"
        )
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FlagError(f"{_flag(name)} must be at least 1, got {value}")
        if self.num_prefix_snapshots < 0:
            raise FlagError(
                f"--num-prefix-snapshots must not be negative, got {self.num_prefix_snapshots}"
            )
        if not 0 <= self.port < 65536:
            raise FlagError(f"--port must lie in 0..65535, got {self.port}")
        if not 0 <= self.seed < 2**63:
            raise FlagError(f"--seed must lie in 0..2**63-1, got {self.seed}")
        if not self.served_model_name:
            raise FlagError("--served-model-name must not be empty")
        if self.api_key == "":
            raise FlagError("--api-key must not be empty; leave it out to serve without a key")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise FlagError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} cannot hold one token of "
                f"each of --max-num-seqs {self.max_num_seqs}; raise the former or lower the latter"
            )
        limit = self.compilation_config and self.compilation_config.max_cudagraph_capture_size
        if len({self.max_capture_tokens, limit} - {None}) > 1 or (
            self.capture_sizes and self.max_capture_tokens
        ):
            assert self.compilation_config is not None
            raise FlagError(
                f"--max-capture-tokens {self.max_capture_tokens} and --compilation-config "
                f"{compilation_to_json(self.compilation_config)} disagree; leave one of them out"
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise FlagError(f"--gpu-memory-utilization must lie in (0, 1], got {share}")
        self._check_synthetic()

    @property
    def model_folder(self) -> Path:
        """The checkpoint folder, the bundled one by default."""
        return self.model or Path(str(resources.files("dspark_jax"))) / "bundled"

    @property
    def capture_tokens(self) -> int | None:
        """Tokens up to which the ladder is fine, from either flag; None for the default."""
        if self.compilation_config is None:
            return self.max_capture_tokens
        return self.max_capture_tokens or self.compilation_config.max_cudagraph_capture_size

    @property
    def capture_sizes(self) -> tuple[int, ...] | None:
        """Step sizes listed one by one; None for a ladder."""
        return self.compilation_config and self.compilation_config.cudagraph_capture_sizes

    @property
    def num_snapshots(self) -> int:
        """Places for snapshots of the prefix cache, 0 without one."""
        return self.num_prefix_snapshots if self.enable_prefix_caching else 0

    @property
    def synthetic_profile(self) -> SyntheticProfile | None:
        """By what drafts are accepted, with the rates of `--speculative-config` over the profile's own."""
        profile, speculative = self.benchmark_synthetic_acceptance, self.speculative_config
        if profile is None or speculative is None:
            return None
        rates = speculative.synthetic_acceptance_rates
        return profile if rates is None else replace(profile, rates=rates)

    def _check_synthetic(self) -> None:
        """The text of synthetic acceptance is worthless: it takes two flags, one of which says so."""
        profile, speculative = self.benchmark_synthetic_acceptance, self.speculative_config
        method = speculative.rejection_sample_method if speculative else None
        if method == "synthetic" and profile is None:
            raise FlagError(
                '"rejection_sample_method": "synthetic" accepts drafts whatever they say, so the text is not the '
                "model's; to benchmark with it add --benchmark-synthetic-acceptance default"
            )
        if profile is not None and method != "synthetic":
            raise FlagError(
                '--benchmark-synthetic-acceptance needs "rejection_sample_method": "synthetic" in '
                "--speculative-config"
            )

    def for_device(self, *, on_gpu: bool) -> DeviceLimits:
        """The limits of a step, with the device's defaults where no flag was given."""
        seqs, tokens = (256, 2048) if on_gpu else (64, 256)
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
            seqs = min(seqs, tokens)
        if self.max_num_seqs is not None:
            seqs = self.max_num_seqs
            tokens = max(tokens, seqs)
        ladder = self.bucket_ladder
        if ladder == "auto":
            ladder = "default" if on_gpu else "doubling"
        return DeviceLimits(seqs, tokens, ladder)

    def check(self, model: ModelConfig) -> None:
        """Refuse, with the remedy, what `model` cannot do; needs no weights.

        Raises `FlagError`.
        """
        limit = model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            raise FlagError(
                f"--max-model-len {self.max_model_len} exceeds the checkpoint's {limit} positions; "
                f"use at most {limit}"
            )
        speculative = self.speculative_config
        if speculative is None:
            return
        if model.draft is None:
            raise FlagError(
                "the checkpoint has no DSpark drafter (no dspark_block_size in config.json); "
                "leave --speculative-config out"
            )
        block_size = model.draft.block_size
        num_drafts = speculative.num_speculative_tokens
        if num_drafts not in (None, block_size):
            raise FlagError(
                f"num_speculative_tokens {num_drafts} is not the block size {block_size} that the "
                f"drafter was trained with; use {block_size}, and fixed_verify_len to verify fewer"
            )
        profile = self.synthetic_profile
        if profile is not None and len(profile.rates) != block_size:
            raise FlagError(
                f"synthetic acceptance has {len(profile.rates)} rates, the drafter {block_size} "
                "positions; give synthetic_acceptance_rates as many"
            )
        for name in ("fixed_verify_len", "min_depth"):
            value = getattr(speculative, name)
            if value is not None and value > block_size:
                raise FlagError(f"{name} {value} exceeds the draft length {block_size}")
        most = self.max_num_batched_tokens
        if most is not None and most < block_size + 1:
            raise FlagError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} cannot hold one request's "
                f"{block_size} drafts and its own token; use at least {block_size + 1}"
            )


def parse_flags(argv: Sequence[str] | None = None) -> ServeConfig:
    """Read the command line.

    Prints one line and exits with status 2 when a flag is unknown, refused, or has a bad value.
    """
    args = [_canonical(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        args = _without_harmless(args)
        config, unknown = tyro.cli(
            ServeConfig,
            prog="python -m dspark_jax.serving.serve",
            args=args,
            return_unknown_args=True,
        )
        if unknown:
            raise FlagError(_unknown_flag(unknown[0]))
    except FlagError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Not as tyro's default, which --help would print.
    return replace(config, api_key=config.api_key or os.environ.get(_API_KEY_VARIABLE) or None)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _canonical(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if name.startswith("--"):
        name = _flag(name[2:])
    return _ALIASES.get(name, name) + equals + value if name.startswith("-") else arg


def _without_harmless(args: Sequence[str]) -> list[str]:
    """Drop flags of `_REFUSED` whose value asks for nothing; `FlagError` for the others."""
    rest, kept = list(args), []
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if name not in _REFUSED:
            kept.append(arg)
            continue
        harmless, remedy = _REFUSED[name]
        if not equals and harmless and rest:
            value = rest.pop(0)
        if value not in harmless:
            raise FlagError(f"{name}: {remedy}")
    return kept


def _unknown_flag(arg: str) -> str:
    name = arg.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {name!r}; the checkpoint folder goes to --model"
    near = difflib.get_close_matches(name, [_flag(f.name) for f in fields(ServeConfig)], n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
    return f"unknown flag {name}; {hint}"
