"""`POST /benchmark/policy`, on servers that were started for benchmarks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI, Request

from dspark_jax.config import ConfigError
from dspark_jax.serving.api.errors import ApiError
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.intake import EngineUnavailable
from dspark_jax.serving.policy_switch import PolicySwitch
from dspark_jax.serving.speculative_config import parse_speculative_config

# A finished request's last step may still be in flight when its client asks.
_ATTEMPTS, _PAUSE_S = 100, 0.05
_KNOWN = {"speculative_config", "max_capture_tokens"}


def add_policy_route(app: FastAPI, switch: PolicySwitch) -> None:
    """Add the route: {"speculative_config": {...} or null, "max_capture_tokens": N or null}."""

    @app.post("/benchmark/policy", include_in_schema=False)
    async def policy(request: Request) -> dict[str, Any]:
        """Change how drafts are verified; 409 while requests run."""
        speculative, most = _read(await request.body())
        for attempt in range(_ATTEMPTS):
            try:
                return await asyncio.to_thread(switch.change, speculative, most)
            except FlagError as error:
                raise ApiError(f"{error}.") from error
            except EngineUnavailable as error:
                if attempt == _ATTEMPTS - 1:
                    raise ApiError(f"Not now: {error}.", status=409) from error
            await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")


def _read(body: bytes) -> tuple[Any, int | None]:
    try:
        values = json.loads(body)
        if not isinstance(values, dict) or not set(values) <= _KNOWN:
            raise ConfigError(f"the body must be a JSON object of {', '.join(sorted(_KNOWN))}")
        speculative, most = values.get("speculative_config"), values.get("max_capture_tokens")
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"max_capture_tokens must be a positive integer, got {most!r}")
        if speculative is not None:
            speculative = parse_speculative_config(json.dumps(speculative))
    except (ConfigError, ValueError) as error:
        raise ApiError(f"{error}.") from error
    return speculative, most
