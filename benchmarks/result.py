"""What a benchmark found: a table, and whether the promise holds."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_LIBRARIES = ("dspark-jax", "jax", "jaxlib", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One benchmark's outcome.

    Attributes:
        name: of the script.
        promise: the sentence that is put to the test.
        is_kept: whether it held.
        rows: the table; all rows have the same keys, in the order of the columns.
        notes: findings that fit no column, one sentence each.
        options: the flags of the run.
    """

    name: str
    promise: str
    is_kept: bool
    rows: Sequence[Row]
    options: Any
    notes: Sequence[str] = field(default_factory=tuple)

    def finish(self, output: Path | None) -> int:
        """Print the table, write JSON to `output`, return the exit status: 1 for a broken promise."""
        print(f"\n{markdown_table(self.rows)}")
        for note in self.notes:
            print(note)
        print(f"{'kept' if self.is_kept else 'BROKEN'}: {self.promise}")
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
            print(f"wrote {output}")
        return 0 if self.is_kept else 1

    def to_json(self) -> dict[str, Any]:
        """The members, with date and environment."""
        options = dataclasses.asdict(self.options)
        return {
            "name": self.name,
            "promise": self.promise,
            "is_kept": self.is_kept,
            "rows": list(self.rows),
            "notes": list(self.notes),
            "options": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in options.items()
                if key != "output"
            },
            "environment": environment(),
            "date": datetime.now().isoformat(timespec="seconds"),
        }


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows with their keys as header, columns aligned; numbers to three digits."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * (width - 1) + ":" for width in widths]
    text = [lines[0], rule, *lines[1:]]
    return "".join(
        "| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(line, widths)) + " |\n"
        for line in text
    )


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Index of the first element that differs, the end of the shorter one included; None if equal."""
    for index, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def environment() -> dict[str, Any]:
    """Processor, load and versions: what figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    installed = {}
    for name in _LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        **installed,
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
