"""The stages of building the bundled model, one command each: `python -m dspark_jax.training.pipeline`.

The two that train fit one call of at most ten minutes on one GPU each and write a few files to one folder, which
the next stage reads; `assemble` needs no GPU. See docs/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from dspark_jax.training import assemble, draft_stage, train_target


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """Build one part of the bundled model."""

    stage: Literal["target", "draft", "assemble"]
    """What to build: the target, its drafter, or the folder that ships from both."""
    out: Path = Path("out")
    """Folder for the results; each stage has its own below it."""
    tokens: Path = Path("out/tokens")
    """Folder written by `dspark_jax.training.tokenizer`."""
    target_minutes: float = 5.0
    """Time for the target's steps."""
    target: Path | None = None
    """Folder of the target stage, by default `target` below `out`."""
    draft_folder: Path | None = None
    """Folder of the drafter that ships, by default `draft` below `out`."""
    first: Path | None = None
    """Folder of the run whose drafter that one was trained from, if it was."""
    comparison: Path | None = None
    """Folder of the drafter's stage whose comparison the card shows, by default `draft` below `out`."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder that ships: tokenizer.json and prompts.jsonl are read there, checkpoint, log and card written."""
    draft: draft_stage.DraftTimes = field(default_factory=draft_stage.DraftTimes)
    """How the drafter's stage spends its time."""
    seed: int = 0
    """Seed of everything random."""


def main(flags: PipelineFlags) -> None:
    """Run one stage."""
    target = flags.target or flags.out / "target"
    if flags.stage == "target":
        train_target.main(
            train_target.TargetFlags(
                tokens=flags.tokens,
                out=target,
                max_minutes=flags.target_minutes,
                seed=flags.seed,
            )
        )
    elif flags.stage == "draft":
        draft_stage.main(
            draft_stage.DraftFlags(
                target=target / "checkpoint",
                tokens=flags.tokens,
                bundle=flags.bundle,
                out=flags.out / "draft",
                times=flags.draft,
                seed=flags.seed,
            )
        )
    else:
        assemble.main(
            assemble.AssembleFlags(
                target=target,
                draft=flags.draft_folder or flags.out / "draft",
                first=flags.first,
                comparison=flags.comparison,
                bundle=flags.bundle,
            )
        )


if __name__ == "__main__":
    main(tyro.cli(PipelineFlags))
