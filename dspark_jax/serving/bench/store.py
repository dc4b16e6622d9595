"""The results of a sweep in one JSON file that a later run can complete."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Result = dict[str, Any]


@dataclass
class SweepStore:
    """Results by arm and concurrency, in memory and on disk.

    Attributes:
        path: the JSON file.
        settings: what must be equal for results to be comparable; JSON values.
        environment: device and versions.
        repeats: (arm, concurrency) → results in the order they were measured.
        arm_errors: arm → why it could not be measured, or not to its end.
    """

    path: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    repeats: dict[tuple[str, int], list[Result]] = field(default_factory=dict)
    arm_errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        path: Path,
        settings: dict[str, Any],
        environment: dict[str, Any],
        *,
        overwrite: bool = False,
    ) -> "SweepStore":
        """Reads `path` if it exists.

        Raises:
            ValueError: the file holds results of other settings and `overwrite` is off.
        """
        settings = json.loads(json.dumps(settings))  # tuples read back as lists
        store = cls(path, settings, environment)
        if not path.exists():
            return store
        saved = json.loads(path.read_text(encoding="utf-8"))
        old = saved["settings"]
        if changed := sorted(k for k in {*old, *settings} if old.get(k) != settings.get(k)):
            if overwrite:
                return store
            name = changed[0]
            raise ValueError(
                f"{path} was measured with {name}={old.get(name)!r}, not {settings.get(name)!r}: "
                "choose another --result-dir, or --overwrite"
            )
        store.repeats = {(p["arm"], p["concurrency"]): p["repeats"] for p in saved["points"]}
        store.arm_errors = saved["arm_errors"]
        return store

    def num_repeats(self, arm: str, concurrency: int) -> int:
        """How many results there are for a point."""
        return len(self.repeats.get((arm, concurrency), ()))

    def forget(self, arm: str, concurrency: int) -> None:
        """Drops the results of a point."""
        self.repeats.pop((arm, concurrency), None)

    def add(self, arm: str, concurrency: int, result: Result) -> None:
        """Adds a result and saves the file."""
        self.repeats.setdefault((arm, concurrency), []).append(result)
        self.save()

    def summaries(self) -> dict[tuple[str, int], Result]:
        """The median result of every point."""
        return {key: median_result(results) for key, results in self.repeats.items()}

    def save(self) -> None:
        """Writes the file in one step: a reader, or a crash, finds the old one or the new one."""
        content = {
            "settings": self.settings,
            "environment": self.environment,
            "arm_errors": self.arm_errors,
            "points": [
                {"arm": arm, "concurrency": concurrency, "summary": summary, "repeats": results}
                for (arm, concurrency), results in self.repeats.items()
                for summary in [median_result(results)]
            ],
        }
        draft = self.path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
        os.replace(draft, self.path)


def median_result(results: Sequence[Result]) -> Result:
    """Medians over repeated results, key by key; lists of numbers position by position.

    Failures are added up instead, so that no repeat can hide those of another. Values that are not
    numbers come from the first result; numbers that some repeats lack, from those that have them.
    `output_throughput_range` is added: the lowest and the highest.
    """
    merged: Result = {}
    for key in dict.fromkeys(key for result in results for key in result):
        values = [result[key] for result in results if result.get(key) is not None]
        if not values:
            merged[key] = None
        elif key in ("failed", "unfinished"):
            merged[key] = sum(values)
        elif key == "failure_reasons":
            reasons = dict.fromkeys(reason for value in values for reason in value)
            merged[key] = {r: sum(value.get(r, 0) for value in values) for r in reasons}
        elif all(isinstance(value, int | float) for value in values):
            merged[key] = _median(values)
        elif all(isinstance(value, list) for value in values):
            merged[key] = [_median(column) for column in zip(*values)]
        else:
            merged[key] = values[0]
    rates = [result["output_throughput"] for result in results]
    merged["output_throughput_range"] = [min(rates), max(rates)]
    return merged


def _median(values: Sequence[float]) -> float:
    median = float(np.median(values))
    return int(median) if median.is_integer() and isinstance(values[0], int) else median
