"""The drafter from beginning to end, within a fixed time on one GPU.

Sample from the rounded target, train, save, calibrate, export, evaluate; then train two short runs of equal length
with and without the transition head, for comparison.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer
from tqdm import tqdm

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.config import ConfigError, ModelConfig
from dspark_jax.draft.params import DraftParams
from dspark_jax.model.params import Params
from dspark_jax.training.calibrate import fit_calibration
from dspark_jax.training.cost import multiply_adds
from dspark_jax.training.data import load_streams
from dspark_jax.training.draft_step import TrainingFlags
from dspark_jax.training.evaluate import (
    as_markdown,
    evaluate_drafter,
    held_out_texts,
    measure_kinds,
    replay,
)
from dspark_jax.training.generate import Text, write_text
from dspark_jax.training.master import save_master
from dspark_jax.training.preset import bundled_config
from dspark_jax.training.prompts import (
    Markers,
    Prompt,
    PromptSampler,
    held_out_prompts,
    load_prompts,
    prompt_rows,
)
from dspark_jax.training.report import Stopwatch, plain_flags, write_report
from dspark_jax.training.train_draft import Trainer, write_lines

SHIPPED_RUN = "drafter"
"""Name, in the log, of the drafter that is kept; the others are only compared."""
FURTHER_RUN = "drafter, further"
"""Its name where it went on from a drafter of an earlier run, which has that name then."""
_FIT_PROMPTS = 1024
_FIT_ROUNDS = 100_000
_LEAST_COMPARISON_S = 15.0
_FINISHING_S = 90.0  # kept for calibration, export and evaluation
_COST_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class DraftTimes:
    """How the drafter's stage spends its time; compiling is not counted, but ends before the deadline too."""

    sampling_seconds: float = 120.0
    """Writing the training text."""
    train_seconds: float = 220.0
    """The steps of the drafter."""
    compare_seconds: float = 45.0
    """The steps of each of the two runs that are compared: less if the deadline is near, 0 for none."""
    deadline_seconds: float = 480.0
    """Everything."""


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """Train, calibrate, export and evaluate the drafter of a trained target."""

    target: Path = Path("out/target/checkpoint")
    """The target in the released formats."""
    tokens: Path = Path("out/tokens")
    """Folder written by `dspark_jax.training.tokenizer`."""
    bundle: Path = Path("dspark_jax/bundled")
    """Folder with tokenizer.json and prompts.jsonl."""
    out: Path = Path("out/draft")
    """Folder for parameters, calibration, checkpoint, log and metrics."""
    times: DraftTimes = field(default_factory=DraftTimes)
    """How long each part takes."""
    initial: Path | None = None
    """Checkpoint whose drafter is trained further, instead of a new one."""
    behind: tuple[int, ...] = (0,) * 10
    """Tokens before the prompts of each text of `rows` sequences. All texts must fit the device's memory."""
    rows: int = 4096
    """Sequences of a text."""
    length: int = 768
    """Tokens of a sequence that the drafter is trained on."""
    rounds: int = 256
    """Rounds of each held-out sequence that are replayed."""
    training: TrainingFlags = field(default_factory=TrainingFlags)
    """How a drafter is trained."""
    seed: int = 0
    """Seed of the sampled text and of the replayed drafts."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Texts behind held-out prompts: one side for the calibration's fit, the other for evaluation."""

    fit: Text
    texts: tuple[Text, Text]
    prompts: list[Prompt]


def write_training_texts(
    target: Params, cfg: ModelConfig, sampler: PromptSampler, flags: DraftFlags
) -> list[Text]:
    """Texts behind training prompts until the time or their list is used up; at least one."""
    texts: list[Text] = []
    started = time.perf_counter()
    for behind in tqdm(flags.behind, desc="sampling", unit="text"):
        ids, lens = sampler(flags.rows, behind)
        # A whole window of the prompt lies within the text.
        offset = max(behind - cfg.sliding_window, 0)
        if not offset:
            ids = ids[:, : flags.length]
        text = write_text(
            target,
            cfg,
            ids,
            lens,
            flags.seed + 1 + len(texts),
            offset=offset,
            length=flags.length,
        )
        texts.append(jax.block_until_ready(text))
        if time.perf_counter() - started > flags.times.sampling_seconds:
            break
    return texts


def write_held_out(
    target: Params, cfg: ModelConfig, tokenizer: Tokenizer, flags: DraftFlags
) -> HeldOut:
    """Sample behind held-out prompts."""
    streams = load_streams(flags.tokens, "held_out")
    fit = held_out_prompts(streams, Markers.of(tokenizer), min(_FIT_PROMPTS, flags.rows), fit=True)
    ids, lens = prompt_rows(fit, flags.rows, flags.length)
    prompts = load_prompts(flags.bundle / "prompts.jsonl", tokenizer)[: flags.rows]
    return HeldOut(
        fit=write_text(target, cfg, ids, lens, flags.seed),
        texts=held_out_texts(target, cfg, prompts, flags.rows, flags.length, flags.seed + 100),
        prompts=prompts,
    )


def calibrated(
    params: DraftParams, target: Params, cfg: ModelConfig, text: Text, flags: DraftFlags
) -> DraftParams:
    """The parameters with a calibration fitted on rounds at temperature 1."""
    played = replay(
        params, target, cfg, text, greedy=False, rounds=flags.rounds, seed=flags.seed + 1
    )
    draw = np.random.default_rng(flags.seed)
    kept = draw.permutation(len(played.accept_lens))[:_FIT_ROUNDS]
    fitted = fit_calibration(played.confidence_logits[kept], played.accept_lens[kept])
    return params.replace(
        calibration_scale=jnp.asarray(fitted.scale), calibration_offset=jnp.asarray(fitted.offset)
    )


def main(flags: DraftFlags, cfg: ModelConfig | None = None) -> None:
    """Run the stage; `cfg` describes target and drafter, by default the bundled ones."""
    watch = Stopwatch()
    cfg = cfg or bundled_config()
    flags.out.mkdir(parents=True, exist_ok=True)
    dtype = jnp.dtype(flags.training.compute_dtype)
    tokenizer = Tokenizer.from_file(str(flags.bundle / "tokenizer.json"))
    _, target, _ = load_checkpoint(flags.target, dtype=dtype)
    # As the released files hold it, so that the export changes nothing.
    _, stored_target, _ = load_checkpoint(flags.target, keep_quantized=True)
    sampler = PromptSampler(
        load_streams(flags.tokens, "drafting"),
        Markers.of(tokenizer),
        length=max(flags.behind) + flags.length,
        longest=min(256, flags.length // 2),
        seed=flags.seed,
    )
    watch.lap("loading")
    texts = write_training_texts(target, cfg, sampler, flags)
    watch.lap("sampling")
    held_out = write_held_out(target, cfg, tokenizer, flags)
    watch.lap("sampling held-out")
    initial = load_checkpoint(flags.initial)[2] if flags.initial else None
    if flags.initial and initial is None:
        raise ConfigError(f"--initial {flags.initial} has no DSpark drafter; leave it out")
    trainer = Trainer(cfg, target, texts, flags.training)
    watch.lap("compiling the step")
    report: dict[str, Any] = {
        "flags": plain_flags(flags),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "multiply_adds": multiply_adds(cfg, _COST_CONTEXT)._asdict(),
        "sampled_tokens": int(sum((flags.length - t.prompt_lens).sum() for t in texts)),
        "behind": [int(behind) for behind, _ in zip(flags.behind, texts, strict=False)],
        "parts_s": watch.parts,
    }
    with (flags.out / "log.jsonl").open("w") as log:
        left = flags.times.deadline_seconds - watch.elapsed - _FINISHING_S
        params, report["training"] = trainer.train(
            write_lines(log, SHIPPED_RUN),
            seconds=min(flags.times.train_seconds, left),
            initial=initial,
        )
        save_master(flags.out, params)
        watch.lap("training")
        report["evaluation"] = _finish(params, stored_target, target, cfg, held_out, flags, watch)
        write_report(flags.out / "metrics.json", report)
        report["comparison"] = _compare(trainer, log, target, cfg, held_out, flags, watch)
    write_report(flags.out / "metrics.json", report)


def _finish(
    params: DraftParams,
    stored_target: Params,
    target: Params,
    cfg: ModelConfig,
    held_out: HeldOut,
    flags: DraftFlags,
    watch: Stopwatch,
) -> dict[str, Any]:
    """Calibrate the drafter as its file will hold it, export, and evaluate what users load."""
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(folder, cfg, stored_target, params, narrow_mixes=True)
        _, _, rounded = load_checkpoint(folder, keep_quantized=True)
        _, _, plain = load_checkpoint(folder, dtype=target.embed.dtype)
    assert rounded is not None
    assert plain is not None
    plain = calibrated(plain, target, cfg, held_out.fit, flags)
    scale, offset = plain.calibration_scale, plain.calibration_offset
    write_report(
        flags.out / "calibration.json", {"scale": scale.tolist(), "offset": offset.tolist()}
    )
    rounded = rounded.replace(calibration_scale=scale, calibration_offset=offset)
    checkpoint = flags.out / "checkpoint"
    export_checkpoint(checkpoint, cfg, stored_target, rounded, narrow_mixes=True)
    watch.lap("calibration and export")
    _, target, draft = load_checkpoint(checkpoint, dtype=target.embed.dtype)
    assert draft is not None
    report = evaluate_drafter(
        draft,
        target,
        cfg,
        held_out.texts,
        held_out.prompts,
        rounds=flags.rounds,
        seed=flags.seed,
    )
    watch.lap("evaluation")
    tqdm.write(as_markdown(report))
    return report


def _compare(
    trainer: Trainer,
    log: Any,
    target: Params,
    cfg: ModelConfig,
    held_out: HeldOut,
    flags: DraftFlags,
    watch: Stopwatch,
) -> dict[str, Any]:
    """Two runs of equal steps, with and without the transition, judged at temperature 1 before rounding."""
    left = flags.times.deadline_seconds - watch.elapsed - _LEAST_COMPARISON_S
    seconds = min(flags.times.compare_seconds, left / 2)
    if seconds < _LEAST_COMPARISON_S:
        tqdm.write(f"no comparison in {seconds:.0f} s")
        return {}
    report: dict[str, Any] = {}
    steps = None
    for name, markov in (("with", True), ("without", False)):
        params, trained = trainer.train(
            write_lines(log, f"{name} transition"), seconds=seconds, steps=steps, markov=markov
        )
        steps = trained["steps"]
        played = replay(
            params,
            target,
            cfg,
            held_out.texts[0],
            greedy=False,
            rounds=flags.rounds,
            seed=flags.seed,
        )
        shown = measure_kinds(played, held_out.prompts, None, greedy=False)
        report[name] = {"training": trained, "sampled": shown}
        watch.lap(f"run {name} transition")
        tqdm.write(f"{name} transition: accepted length {shown['accepted_length']:.3f}")
    return report


if __name__ == "__main__":
    main(tyro.cli(DraftFlags))
