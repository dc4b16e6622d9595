"""What `--benchmark-synthetic-acceptance` may say: how often drafts are accepted, and how sure the drafter is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_jax.config import ConfigError
from dspark_jax.serving.json_object import json_object

DEFAULT_RATES = (0.78, 0.60, 0.46, 0.35, 0.24, 0.15, 0.09)
"""Survival by position, after what is published of V4 with seven drafts: over 0.70 first, under 0.10 last."""


@dataclass(frozen=True, kw_only=True)
class SyntheticProfile:
    """Laws of acceptance; `decode.synthetic` has the equations.

    Attributes:
        rates: chance that the first k drafts are all accepted, k = 1..G; non-increasing.
        request_spread: share of the variance that is a request's own for its whole life.
        round_spread: share that differs from round to round and that the drafter knows.
        miscalibration: published confidences have this multiple of the true log-odds.
    """

    rates: tuple[float, ...] = DEFAULT_RATES
    request_spread: float = 0.2
    round_spread: float = 0.2
    miscalibration: float = 1.0

    def __post_init__(self) -> None:
        check_rates("rates", self.rates)
        for name in ("request_spread", "round_spread"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.request_spread + self.round_spread > 0.99:
            raise ConfigError(
                f"request_spread {self.request_spread} and round_spread {self.round_spread} leave "
                "nothing to chance; together at most 0.99"
            )
        if not 0 < self.miscalibration < math.inf:
            raise ConfigError(f"miscalibration must be positive, got {self.miscalibration}")


def check_rates(name: str, rates: Sequence[float]) -> None:
    """Raise `ConfigError` unless `rates` are survivals: in [0, 1] and non-increasing."""
    if not rates:
        raise ConfigError(f"{name} must not be empty")
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"{name} must lie in [0, 1], got {list(rates)}")
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            f"{name} are chances that the first k drafts are all accepted and cannot rise, got {list(rates)}"
        )


def parse_profile(text: str) -> SyntheticProfile:
    """Read `default` or a JSON object of the attributes.

    Raises `ConfigError`.
    """
    if text == "default":
        return SyntheticProfile()
    values = json_object(text)
    known = {field.name for field in dataclasses.fields(SyntheticProfile)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; known are {', '.join(sorted(known))}")
        numbers = value if key == "rates" else [value]
        if not isinstance(numbers, list) or any(type(n) not in (int, float) for n in numbers):
            kind = "a list of numbers" if key == "rates" else "a number"
            raise ConfigError(f"{key} must be {kind}, got {json.dumps(value)}")
    if "rates" in values:
        values["rates"] = tuple(values["rates"])
    return SyntheticProfile(**values)


def profile_to_json(profile: SyntheticProfile) -> str:
    """JSON from which `parse_profile` gives `profile` back."""
    return json.dumps(dataclasses.asdict(profile))
