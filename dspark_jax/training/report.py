"""What the stages share in reporting: time, flags and files."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Stopwatch:
    """Seconds since the start, and the length of each part for the report."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def lap(self, name: str) -> None:
        """Book the time since the last lap under `name`."""
        now = time.perf_counter()
        self.parts[name] = now - self._last
        self._last = now
        tqdm.write(f"{self.elapsed:7.1f} s  {name} took {self.parts[name]:.1f} s")


def plain_flags(flags: Any) -> dict[str, Any]:
    """A dataclass of flags as JSON can hold it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(flags))


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write indented JSON; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
