"""What `--compilation-config` may say: vLLM's keys for the step sizes that are compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dspark_jax.config import ConfigError
from dspark_jax.serving.json_object import json_object

_KNOWN = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """Step sizes that are compiled.

    Attributes:
        max_cudagraph_capture_size: as `--max-capture-tokens`.
        cudagraph_capture_sizes: token counts of steps, increasing, instead of a ladder; those up to
            `--max-num-seqs` are also the request counts that the drafter is compiled for.
    """

    max_cudagraph_capture_size: int | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        most, sizes = self.max_cudagraph_capture_size, self.cudagraph_capture_sizes
        if most is not None and most < 1:
            raise ConfigError(f"max_cudagraph_capture_size must be at least 1, got {most}")
        if sizes is None:
            return
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigError(
                f"cudagraph_capture_sizes must be positive and increasing, got {list(sizes)}"
            )
        if most is not None and most != sizes[-1]:
            raise ConfigError(
                f"max_cudagraph_capture_size {most} is not the last of cudagraph_capture_sizes, "
                f"{sizes[-1]}; leave one of them out"
            )


def parse_compilation_config(text: str) -> CompilationConfig:
    """Read the JSON object of the flag. Raises `ConfigError`."""
    values = json_object(text)
    for key, value in values.items():
        if key not in _KNOWN:
            raise ConfigError(f"unknown key {key!r}; known are {', '.join(_KNOWN)}")
        if key == "cudagraph_capture_sizes":
            if not isinstance(value, list) or any(type(size) is not int for size in value):
                raise ConfigError(f"{key} must be a list of integers, got {json.dumps(value)}")
            values[key] = tuple(value)
        elif type(value) is not int:
            raise ConfigError(f"{key} must be an integer, got {json.dumps(value)}")
    return CompilationConfig(**values)


def compilation_to_json(config: CompilationConfig) -> str:
    """The shortest JSON from which `parse_compilation_config` gives `config` back."""
    values: dict[str, Any] = {name: getattr(config, name) for name in _KNOWN}
    return json.dumps({name: value for name, value in values.items() if value is not None})
