"""How good the drafter is on held-out prompts: `python -m dspark_jax.training.evaluate`.

Rounds are replayed (`training.rounds`) with every proposal verified in full length, so acceptance is that of
decoding with a fixed draft length.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer
from tqdm import tqdm

from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.config import ConfigError, ModelConfig
from dspark_jax.draft.params import DraftParams
from dspark_jax.model.params import Params
from dspark_jax.training.calibrate import (
    Calibration,
    calibration_error,
    error_floor,
    ranking_quality,
    survival,
    survival_labels,
)
from dspark_jax.training.cost import multiply_adds
from dspark_jax.training.draft_forward import cast_draft
from dspark_jax.training.generate import Text, write_text
from dspark_jax.training.prompts import Prompt, load_prompts, prompt_rows
from dspark_jax.training.report import plain_flags, write_report
from dspark_jax.training.rounds import Replay, collect, replay_rounds

_MEASURED_ROUNDS = 200_000  # for calibration; more only cost time
_COST_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Acceptance, accepted length and calibration of a checkpoint's drafter at temperatures 0 and 1."""

    model: Path = Path("dspark_jax/bundled")
    """Checkpoint folder with tokenizer.json."""
    prompts: Path | None = None
    """Prompts, as written by `dspark_jax.training.prompts`; by default prompts.jsonl of the model."""
    rows: int = 4096
    """Sequences at temperature 1; prompts repeat. 8 are enough for a look on a CPU."""
    length: int = 768
    """Tokens per sequence, prompt included."""
    rounds: int = 256
    """At most this many rounds of each sequence count."""
    compute_dtype: str = "bfloat16"
    """Of activations."""
    out: Path | None = None
    """JSON file for the report."""
    seed: int = 0
    """Seed of the sampled text and of the drafts."""


def replay(
    params: DraftParams,
    target: Params,
    cfg: ModelConfig,
    text: Text,
    *,
    greedy: bool,
    rounds: int,
    seed: int,
    rows: int | None = None,
) -> Replay:
    """`replay_rounds` of a drafter in the dtype of the target, collected from the first `rows` sequences."""
    played = replay_rounds(
        cast_draft(params, cfg, target.embed.dtype),
        target.embed,
        target.head,
        cfg,
        text,
        jnp.asarray(greedy),
        jax.random.key(seed, impl="rbg"),
        rounds=rounds,
        fused=jax.default_backend() == "gpu",
    )
    return collect(played, rows)


def measure(played: Replay, calibration: Calibration | None, *, greedy: bool) -> dict[str, Any]:
    """What the rounds show, as numbers and lists with one entry per position.

    `acceptance` is conditional on the prefix, `survival` is not. `survival_error` is the expected calibration
    error of the predicted survival before and after calibration; `floor` what perfect predictions would show.
    """
    if not len(played.accept_lens):
        raise ValueError("no round happened: the texts end too early or there are too few")
    positions = played.confidence_logits.shape[1]
    labels = survival_labels(played.accept_lens, positions)
    survived = labels.mean(axis=0)
    before = np.concatenate([[1.0], survived[:-1]])
    report: dict[str, Any] = {
        "rounds": len(labels),
        "sequences": len(np.unique(played.rows)),
        "accepted_length": float(1 + played.accept_lens.mean()),
        "acceptance": (survived / np.maximum(before, 1e-9)).tolist(),
        "survival": survived.tolist(),
    }
    if not greedy:
        expected = 1 + np.cumprod(played.acceptance, axis=1).sum(axis=1)
        report["teacher_forced_accepted_length"] = float(expected.mean())
    if len(labels) > _MEASURED_ROUNDS:
        kept = np.random.default_rng(0).choice(len(labels), _MEASURED_ROUNDS, replace=False)
        labels, logits = labels[kept], played.confidence_logits[kept]
    else:
        logits = played.confidence_logits
    for name, fitted in (("raw", None), ("calibrated", calibration)):
        if name == "calibrated" and fitted is None:
            continue
        predicted = survival(logits, fitted)
        columns = [(predicted[:, k], labels[:, k]) for k in range(positions)]
        report[name] = {
            "survival_error": [calibration_error(p, y) for p, y in columns],
            "floor": [error_floor(p) for p, _ in columns],
            "auroc": [ranking_quality(p, y) for p, y in columns],
            "expected_accepted_length": float(1 + predicted.sum(axis=1).mean()),
        }
    return report


def measure_kinds(
    played: Replay,
    prompts: list[Prompt],
    calibration: Calibration | None,
    *,
    greedy: bool,
) -> dict[str, Any]:
    """`measure` of all rounds, with the accepted length of each kind of prompt."""
    report = measure(played, calibration, greedy=greedy)
    kinds = np.array([p.kind for p in prompts])[played.rows % len(prompts)]
    report["accepted_length_by_kind"] = {
        str(kind): float(1 + played.accept_lens[kinds == kind].mean()) for kind in np.unique(kinds)
    }
    return report


def held_out_texts(
    target: Params, cfg: ModelConfig, prompts: list[Prompt], rows: int, length: int, seed: int
) -> tuple[Text, Text]:
    """What the target writes behind the prompts at temperature 1 and, each prompt once in front, at 0."""
    ids, lens = prompt_rows(prompts, rows, length)
    return (
        write_text(target, cfg, ids, lens, seed, temperature=1.0),
        write_text(target, cfg, ids, lens, seed, temperature=0.0),
    )


def evaluate_drafter(
    params: DraftParams,
    target: Params,
    cfg: ModelConfig,
    texts: tuple[Text, Text],
    prompts: list[Prompt],
    *,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """`measure_kinds` at both temperatures, with the calibration that the parameters hold."""
    calibration = Calibration(
        np.asarray(params.calibration_scale), np.asarray(params.calibration_offset)
    )
    report = {}
    for name, text, greedy in (("sampled", texts[0], False), ("greedy", texts[1], True)):
        played = replay(
            params,
            target,
            cfg,
            text,
            greedy=greedy,
            rounds=rounds,
            seed=seed,
            # At temperature 0 a repeated prompt repeats its text.
            rows=len(prompts) if greedy else None,
        )
        report[name] = measure_kinds(played, prompts, calibration, greedy=greedy)
    return report


def as_markdown(report: dict[str, Any]) -> str:
    """One table per temperature, positions as columns."""
    lines = []
    for name, title in (("sampled", "Temperature 1"), ("greedy", "Temperature 0")):
        part = report[name]
        positions = range(1, len(part["survival"]) + 1)
        lines += [
            f"{title}: {part['rounds']} rounds in {part['sequences']} sequences, "
            f"accepted length {part['accepted_length']:.3f}",
            "",
            "| position | " + " | ".join(map(str, positions)) + " |",
            "|---|" + "---|" * len(positions),
            _table_row("acceptance", part["acceptance"]),
            _table_row("survival", part["survival"]),
        ]
        for key, label in (("raw", "raw"), ("calibrated", "calibrated")):
            if key in part:
                lines += [
                    _table_row(f"survival error, {label}", part[key]["survival_error"]),
                    _table_row(f"sampling floor, {label}", part[key]["floor"]),
                    _table_row(f"AUROC, {label}", part[key]["auroc"]),
                ]
        lines.append("")
    return "\n".join(lines)


def _table_row(label: str, values: list[float | None]) -> str:
    cells = ("–" if v is None else f"{v:.3f}" for v in values)
    return f"| {label} | " + " | ".join(cells) + " |"


def main(flags: EvaluationFlags) -> None:
    """Evaluate, print the tables, and write the report."""
    started = time.perf_counter()
    cfg, target, draft = load_checkpoint(flags.model, dtype=jnp.dtype(flags.compute_dtype))
    if draft is None:
        raise ConfigError(f"{flags.model} has no DSpark drafter")
    tokenizer = Tokenizer.from_file(str(flags.model / "tokenizer.json"))
    prompts = load_prompts(flags.prompts or flags.model / "prompts.jsonl", tokenizer)
    prompts = prompts[: flags.rows]
    texts = held_out_texts(target, cfg, prompts, flags.rows, flags.length, flags.seed)
    report = evaluate_drafter(
        draft, target, cfg, texts, prompts, rounds=flags.rounds, seed=flags.seed
    )
    report |= {
        "flags": plain_flags(flags),
        "device": jax.devices()[0].device_kind,
        "multiply_adds": multiply_adds(cfg, _COST_CONTEXT)._asdict(),
        "seconds": time.perf_counter() - started,
    }
    tqdm.write(as_markdown(report))
    tqdm.write(json.dumps(report["multiply_adds"]))
    if flags.out is not None:
        write_report(flags.out, report)


if __name__ == "__main__":
    main(tyro.cli(EvaluationFlags))
