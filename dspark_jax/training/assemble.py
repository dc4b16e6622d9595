"""The last stage of the build: checkpoint, card and log into the folder that ships."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark_jax.training.card import MIB, model_card
from dspark_jax.training.draft_stage import FURTHER_RUN, SHIPPED_RUN
from dspark_jax.training.results import CARD, LOG, aims, read_build

MAX_TARGET_BYTES = 12 * MIB
MAX_FOLDER_BYTES = 16 * MIB
_CHECKPOINT = ("config.json", "model.safetensors")
_LINES_PER_RUN = 100


@dataclass(frozen=True, kw_only=True)
class AssembleFlags:
    """Put the results of the other stages into the folder that ships."""

    target: Path = Path("out/target")
    """Folder of the target's stage."""
    draft: Path = Path("out/draft")
    """Folder of the drafter's stage."""
    first: Path | None = None
    """Folder of the run whose drafter `draft` trained further, if it did."""
    comparison: Path | None = None
    """Folder of another run of the drafter's stage that compared drafters with and without the Markov head."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder that ships; tokenizer.json, prompts.jsonl, held_out.txt and LICENSE-PSF are there already."""


def thinned(lines: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` >= 2 of the lines, evenly spread, first and last included."""
    if len(lines) <= most:
        return lines
    return [lines[round(i * (len(lines) - 1) / (most - 1))] for i in range(most)]


def training_log(
    target: Path, draft: Path, first: Path | None, comparison: Path
) -> list[dict[str, Any]]:
    """The logs of all runs in order, each thinned and its lines marked with the name of the run.

    Of `draft` it takes the drafter that ships, of `first` the one that it was trained from, of `comparison` the
    drafters that were only compared.
    """
    lines = [{"run": "target"} | line for line in _read_log(target)]
    shipped = [line for line in _read_log(draft) if line["run"] == SHIPPED_RUN]
    if first:
        lines += [line for line in _read_log(first) if line["run"] == SHIPPED_RUN]
        shipped = [line | {"run": FURTHER_RUN} for line in shipped]
    lines += shipped
    lines += [line for line in _read_log(comparison) if line["run"] != SHIPPED_RUN]
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault(line["run"], []).append(line)
    return [line for lines in runs.values() for line in thinned(lines, _LINES_PER_RUN)]


def _read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def main(flags: AssembleFlags) -> None:
    """Copy the checkpoint, write log and card.

    Raises `ValueError` if target or folder are larger than they may be; the card is then not written.
    """
    for name in _CHECKPOINT:
        shutil.copyfile(flags.draft / "checkpoint" / name, flags.bundle / name)
    comparison = flags.comparison or flags.draft
    lines = training_log(flags.target, flags.draft, flags.first, comparison)
    (flags.bundle / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    build = read_build(flags.target, flags.draft, flags.first, comparison, flags.bundle)
    if build.sizes.target > MAX_TARGET_BYTES or build.sizes.folder > MAX_FOLDER_BYTES:
        raise ValueError(
            f"{build.sizes} is more than {MAX_TARGET_BYTES} bytes for the target "
            f"or {MAX_FOLDER_BYTES} for the folder"
        )
    (flags.bundle / CARD).write_text(model_card(build), encoding="utf-8")
    for aim in aims(build):
        reached = f"{aim.name}: {aim.reached:.3f}, wanted {aim.wanted}"
        tqdm.write(reached if aim.is_met else f"{reached}: missed")
