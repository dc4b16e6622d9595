"""What a finished build has left behind, and what was wanted of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.checkpoint.safetensors import read_header
from dspark_jax.config import ModelConfig, load_config

CARD = "MODEL_CARD.md"
LOG = "training_log.jsonl"


class Sizes(NamedTuple):
    """Bytes of the target's and the drafter's tensors, and of all files of the folder but the card."""

    target: int
    draft: int
    folder: int


@dataclass(frozen=True, kw_only=True)
class Build:
    """Configuration, figures and sizes of a bundled model."""

    cfg: ModelConfig
    target: dict[str, Any]
    """metrics.json of the target's stage."""
    draft: dict[str, Any]
    """metrics.json of the drafter's stage."""
    first: dict[str, Any] | None
    """metrics.json of the run whose drafter that stage trained further, if it did."""
    comparison: dict[str, Any]
    """metrics.json of the drafter's stage that compared two without transition and with it; may be `draft`."""
    calibration: dict[str, list[float]]
    """calibration.json of the drafter's stage."""
    sizes: Sizes
    held_out_header: str
    """First line of held_out.txt: which library the text is."""
    num_held_out: int
    """Files that it lists."""


class Aim(NamedTuple):
    """A figure that the drafter was meant to reach: at least `bound`, or at most."""

    name: str
    bound: float
    reached: float
    is_least: bool

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached >= self.bound if self.is_least else self.reached <= self.bound

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"at {'least' if self.is_least else 'most'} {self.bound:g}"


def measure_sizes(bundle: Path) -> Sizes:
    """Sizes of a folder that ships. The card states them, so it can't be counted; it has a few KiB."""
    tensors = {True: 0, False: 0}
    for name, info in read_header(bundle / "model.safetensors").items():
        tensors[name.startswith("mtp.")] += info.num_bytes
    files = (f for f in bundle.rglob("*") if f.is_file() and f.name != CARD)
    return Sizes(tensors[False], tensors[True], sum(f.stat().st_size for f in files))


def read_build(
    target: Path, draft: Path, first: Path | None, comparison: Path, bundle: Path
) -> Build:
    """What the stages wrote to their folders, beside the folder that ships as it is now."""
    header, *files = (bundle / "held_out.txt").read_text(encoding="utf-8").splitlines()
    return Build(
        cfg=load_config(bundle),
        target=json.loads((target / "metrics.json").read_text()),
        draft=json.loads((draft / "metrics.json").read_text()),
        first=json.loads((first / "metrics.json").read_text()) if first else None,
        comparison=json.loads((comparison / "metrics.json").read_text()),
        calibration=json.loads((draft / "calibration.json").read_text()),
        sizes=measure_sizes(bundle),
        held_out_header=header.removeprefix("#").strip().rstrip("."),
        num_held_out=len(files),
    )


def aims(build: Build) -> list[Aim]:
    """What was wanted of the drafter on held-out prompts at temperature 1, and what it reached."""
    sampled = build.draft["evaluation"]["sampled"]
    error = max(sampled["calibrated"]["survival_error"])
    share = build.draft["multiply_adds"]["draft_share"]
    return [
        Aim("acceptance at position 1", 0.62, sampled["acceptance"][0], True),
        Aim("accepted length", 2.5, sampled["accepted_length"], True),
        Aim("survival at the last position", 0.10, sampled["survival"][-1], False),
        Aim("largest survival error, calibrated", 0.03, error, False),
        Aim("multiply-adds of drafting over verifying", 0.25, share, False),
    ]
