"""JSON objects as values of flags."""

from __future__ import annotations

import json
from typing import Any

from dspark_jax.config import ConfigError


def json_object(text: str) -> dict[str, Any]:
    """Parse a flag's JSON object; `ConfigError` if it is not one."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"must be a JSON object, got {text}")
    return values
