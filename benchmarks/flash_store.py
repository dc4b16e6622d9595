"""The results of `benchmarks.flash_sweep`: one JSON file that grows by a point at a time."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class PointKey(NamedTuple):
    """What tells one measurement from another."""

    scenario: str  # a free name for model, lengths and limits; its settings are stored
    capture: int  # step sizes are fine up to so many tokens
    arm: str
    concurrency: int


@dataclass
class FlashStore:
    """Everything measured so far.

    Attributes:
        path: the file.
        settings: scenario -> what must be equal for its points to be comparable.
        starts: one entry per server that was started: times, cost profile, environment.
        points: results by key.
    """

    path: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    points: dict[PointKey, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> FlashStore:
        """Read `path` if it exists."""
        store = cls(path)
        if path.exists():
            saved = json.loads(path.read_text())
            store.settings, store.starts = saved["settings"], saved["starts"]
            for point in saved["flash_points"]:
                key = PointKey(*(point[name] for name in PointKey._fields))
                store.points[key] = point["result"]
        return store

    def use(self, scenario: str, settings: dict[str, Any]) -> None:
        """Name the settings of the scenario that is measured now.

        Raises ValueError when its points so far were measured with others.
        """
        settings = json.loads(json.dumps(settings))  # tuples read back as lists
        old = self.settings.setdefault(scenario, settings)
        changed = sorted(k for k in {*old, *settings} if old.get(k) != settings.get(k))
        if changed:
            name = changed[0]
            raise ValueError(
                f"{self.path}: scenario {scenario!r} was measured with {name}={old.get(name)!r}, not "
                f"{settings.get(name)!r}: choose another --scenario or --output"
            )

    def add(self, key: PointKey, result: dict[str, Any]) -> None:
        """Keep a result and save the file."""
        self.points[key] = result
        self.save()

    def save(self) -> None:
        """Write the file in one step: a reader, or a crash, finds the old one or the new one."""
        content = {
            "settings": self.settings,
            "starts": self.starts,
            "flash_points": [
                {**key._asdict(), "result": result} for key, result in sorted(self.points.items())
            ],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(draft, self.path)
