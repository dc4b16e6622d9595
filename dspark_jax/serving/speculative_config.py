"""What `--speculative-config` may say."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from dspark_jax.config import ConfigError
from dspark_jax.serving.json_object import json_object
from dspark_jax.serving.synthetic_profile import check_rates

_KIND_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and verified. Keys that vLLM knows have its meaning.

    Attributes:
        method: `dspark` is the only one.
        num_speculative_tokens: tokens drafted per round; the checkpoint's block size, which is also
            the default.
        enable_adaptive_verification: choose in each step how many drafts are worth verifying;
            otherwise all are, or the first `fixed_verify_len` of each request.
        fixed_verify_len: drafts verified per request; excludes adaptive verification.
        draft_sample_method: `probabilistic` draws drafts from the drafter's distribution at the
            request's temperature, `greedy` takes the most likely token.
        rejection_sample_method: `standard` rejection sampling; with `coupled` draft and target draw
            with the same noise, so that a seed gives the same tokens with and without speculation; `synthetic`
            accepts by chance, for benchmarks.
        synthetic_acceptance_rates: for `synthetic`, chance that the first k drafts are all accepted, k = 1..G.
        min_depth: drafts of every request that are verified whatever their confidence, while the drafter runs.
        target_token_ms: bound on the expected time per token of the slowest request.
        hysteresis: a partial budget must be predicted faster by this fraction than verifying
            nothing and than verifying everything.
        prompt_cost: who pays for prompt tokens when a step is sized: `sunk` nobody, since they must be fed
            whatever is verified; `shared` all tokens of the step, as in vLLM, which makes drafts look cheap beside
            long prompts.
        confidence_smoothing: weight of the newest proposal in an average over a request's past ones, from
            which steps are sized; None takes the newest alone.
        enable_drafter_skipping: stop drafting while ordinary decoding is predicted to be faster.
        enable_live_correction: correct the cost model by measured step times.
        enable_acceptance_correction: correct the confidences that size a step by how many drafts were accepted
            for how many promised.
    """

    method: Literal["dspark"] = "dspark"
    num_speculative_tokens: int | None = None
    enable_adaptive_verification: bool = False
    fixed_verify_len: int | None = None
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    rejection_sample_method: Literal["standard", "coupled", "synthetic"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    min_depth: int = 0
    target_token_ms: float | None = None
    hysteresis: float = 0.01
    prompt_cost: Literal["sunk", "shared"] = "sunk"
    confidence_smoothing: float | None = None
    enable_drafter_skipping: bool = True
    enable_live_correction: bool = True
    enable_acceptance_correction: bool = True

    def __post_init__(self) -> None:
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        _at_least("fixed_verify_len", self.fixed_verify_len, 0)
        _at_least("min_depth", self.min_depth, 0)
        if self.synthetic_acceptance_rates is not None:
            if self.rejection_sample_method != "synthetic":
                raise ConfigError(
                    'synthetic_acceptance_rates needs "rejection_sample_method": "synthetic"'
                )
            check_rates("synthetic_acceptance_rates", self.synthetic_acceptance_rates)
        if self.target_token_ms is not None and not 0 < self.target_token_ms < math.inf:
            raise ConfigError(f"target_token_ms must be positive, got {self.target_token_ms}")
        if not 0 <= self.hysteresis < 1:
            raise ConfigError(f"hysteresis must lie in [0, 1), got {self.hysteresis}")
        if self.confidence_smoothing is not None and not 0 < self.confidence_smoothing <= 1:
            raise ConfigError(
                f"confidence_smoothing must lie in (0, 1], got {self.confidence_smoothing}"
            )
        if self.enable_adaptive_verification and self.fixed_verify_len is not None:
            raise ConfigError(
                "fixed_verify_len and enable_adaptive_verification exclude each other; "
                "leave one of them out"
            )
        adaptive_only = {
            "min_depth": self.min_depth or None,
            "target_token_ms": self.target_token_ms,
            "confidence_smoothing": self.confidence_smoothing,
        }
        for name, value in adaptive_only.items():
            if value is not None and not self.enable_adaptive_verification:
                raise ConfigError(f"{name} needs enable_adaptive_verification")

    @property
    def mode(self) -> Literal["fixed", "adaptive"]:
        """The budget policy."""
        return "adaptive" if self.enable_adaptive_verification else "fixed"


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read the JSON object of the flag.

    Raises `ConfigError` when it is no JSON object, has an unknown key, or a value of a wrong type.
    """
    values = json_object(text)
    hints = get_type_hints(SpeculativeConfig)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown key {key!r}; known are {', '.join(hints)}")
        if key == "synthetic_acceptance_rates":
            values[key] = _rates(key, value)
        else:
            _check_type(key, value, hints[key])
    return SpeculativeConfig(**values)


def to_json(config: SpeculativeConfig) -> str:
    """The shortest JSON from which `parse_speculative_config` gives `config` back."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    given = {k: v for k, v in dataclasses.asdict(config).items() if v != defaults[k]}
    return json.dumps({"method": config.method, **given})


def _rates(key: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(rate) not in (int, float) for rate in value):
        raise ConfigError(f"{key} must be a list of numbers or null, got {json.dumps(value)}")
    return tuple(value)


def _check_type(key: str, value: Any, hint: Any) -> None:
    options = get_args(hint) or (hint,)
    kinds = [option for option in options if isinstance(option, type)]
    if not kinds:
        if value not in options:
            raise ConfigError(f"{key} must be one of {', '.join(options)}, got {value!r}")
        return
    # bool is an int to Python, and an integer is a fine float.
    accepted = {*kinds, int} if float in kinds else set(kinds)
    if type(value) not in accepted:
        expected = " or ".join(_KIND_NAMES.get(kind, "null") for kind in kinds)
        raise ConfigError(f"{key} must be {expected}, got {json.dumps(value)}")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
