"""The card says what was measured, and the folder that ships holds what its build left."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path

import pytest

from dspark_jax.training import assemble
from dspark_jax.training.card import MIB, model_card
from dspark_jax.training.draft_stage import FURTHER_RUN
from dspark_jax.training.preset import bundled_config
from dspark_jax.training.results import CARD, LOG, Build, Sizes, aims, measure_sizes

BUNDLE = Path(str(resources.files("dspark_jax") / "bundled"))


def judged(first: float, length: float, error: float) -> dict:
    state = {"survival_error": [error, 0.011], "floor": [0.004, 0.002], "auroc": [0.7, None]}
    return {
        "rounds": 1234,
        "sequences": 56,
        "accepted_length": length,
        "acceptance": [first, 0.5],
        "survival": [first, first / 2],
        "raw": state | {"survival_error": [0.09, 0.02]},
        "calibrated": state,
        "accepted_length_by_kind": {"chat": 1.5, "code": 2.75},
    }


def build(*, first: float = 0.1234, length: float = 1.777, error: float = 0.013) -> Build:
    held_out = {
        "nats": 2.0,
        "perplexity": 7.389,
        "bits_per_byte": 0.876,
        "unigram_perplexity": 543.2,
        "unigram_bits_per_byte": 3.21,
    }
    run = {"training": {"steps": 77, "train_s": 20.0}, "sampled": judged(0.3, 1.9, 0.01)}
    return Build(
        cfg=bundled_config(),
        target={
            "flags": {"max_minutes": 3.25, "length": 2048},
            "device": "Some GPU",
            "jax": "1.2.3",
            "steps": 4321,
            "tokens": 50_000_000,
            "train_tokens": {"library": 10_000_000, "chat": 2_500_000},
            "train_s": 199.0,
            "last": {"nats": 0.99},
            "held_out": {"library": held_out, "chat": held_out | {"nats": 2.5}},
            "held_out_rounded": {
                "library": held_out | {"nats": 2.025, "perplexity": 7.576},
                "chat": held_out | {"nats": 2.5},
            },
        },
        draft={
            "flags": {
                "seed": 3,
                "length": 768,
                "times": {
                    "train_seconds": 200.0,
                    "compare_seconds": 0.0,
                    "deadline_seconds": 400.0,
                },
                "training": {"compute_dtype": "bfloat16"},
            },
            "multiply_adds": {"target_token": 8e6, "draft_slot": 2e6, "draft_share": 0.2345},
            "sampled_tokens": 12_340_000,
            "behind": [0, 1024],
            "parts_s": {"sampling": 40.0, "training": 200.0},
            "training": {"steps": 999, "train_s": 198.0, "acceptance": [0.7, 0.6]},
            "evaluation": {
                "sampled": judged(first, length, error),
                "greedy": judged(0.8, 3.333, 0.095),
            },
            "comparison": {},
        },
        first=None,
        comparison={
            "flags": {
                "times": {
                    "train_seconds": 100.0,
                    "compare_seconds": 20.0,
                    "deadline_seconds": 300.0,
                }
            },
            "comparison": {"with": run, "without": run},
        },
        calibration={"scale": [1.5, 0.75], "offset": [0.25, -0.5]},
        sizes=Sizes(target=11 * MIB, draft=3 * MIB, folder=15 * MIB),
        held_out_header="Files of CPython 9.9's library",
        num_held_out=42,
    )


def test_card_states_the_figures():
    card = model_card(build())
    for text in (
        "| target | 14.95 M | 11.00 |",
        "--target-minutes 3.25",
        "--draft.train-seconds 200 \\ --draft.compare-seconds 0 --draft.deadline-seconds 400",
        "--draft.train-seconds 100 \\ --draft.compare-seconds 20 --draft.deadline-seconds 300",
        "--target out/target --out out/comparison",
        "--stage assemble --comparison out/comparison/draft",
        "On one Some GPU with JAX 1.2.3",
        "4321 steps, 50.00 M tokens",
        "| library | 543 | 7.39 | 7.58 | +0.025 | 3.21 | 0.88 |",
        "Temperature 1: 1234 rounds in 56 sequences, accepted length 1.777",
        "| acceptance | 0.123 | 0.500 |",
        "| temperature 0 | 1.500 | 2.750 |",
        "| scale | +1.500 | +0.750 |",
        "23.4%",
        "4.0 times its text",
        "behind a rejection in decoding",
        "lists the 42 files",
    ):
        assert " ".join(text.split()) in " ".join(card.split()), text
    # At temperature 0 the first position got worse and the second better.
    assert "0.090 before and 0.095 after, and 1 of 2" in " ".join(card.split())
    assert max(len(line) for line in card.splitlines() if not line.startswith("|")) <= 110


def test_card_says_which_aims_are_missed():
    missed = {aim.name for aim in aims(build()) if not aim.is_met}
    assert missed == {"acceptance at position 1", "accepted length"}
    assert "Missed: acceptance at position 1, accepted length." in model_card(build())
    good = build(first=0.62, length=2.5, error=0.03)
    # Survival at the last of two positions is 0.31 there.
    assert [aim.name for aim in aims(good) if not aim.is_met] == ["survival at the last position"]
    assert "| accepted length | at least 2.5 | 2.500 | yes |" in model_card(good)


def test_card_of_a_drafter_that_was_trained_further():
    made = build()
    further = {
        "seed": 5,
        "behind": [0, 2048],
        "training": {"compute_dtype": "bfloat16", "peak": 0.002},
        "times": {"train_seconds": 50.0, "compare_seconds": 0.0, "deadline_seconds": 90.0},
    }
    draft = made.draft | {
        "flags": made.draft["flags"] | further,
        "training": made.draft["training"] | {"steps": 111},
        "behind": [0, 2048],
    }
    card = " ".join(model_card(dataclasses.replace(made, draft=draft, first=made.draft)).split())
    for text in (
        "--stage draft --draft.train-seconds 200 \\ --draft.compare-seconds 0",
        "--initial out/draft/checkpoint --out out/further \\ --behind 0 2048 --training.peak 0.002 --seed 5",
        "--times.train-seconds 50 \\ --times.compare-seconds 0 --times.deadline-seconds 90",
        "--draft-folder out/further --first out/draft",
        "| first drafter, training | 198 |",
        "the drafter for 999 steps on 12.34 M tokens and 111 steps on 12.34 M tokens",
        "on text behind as many as 2048",
    ):
        assert text in card, text


def test_card_without_comparison():
    made = build()
    card = model_card(dataclasses.replace(made, comparison=made.draft))
    assert "No comparison was run." in card
    assert "--stage assemble\n" in card


def test_log_keeps_both_ends_of_every_run(tmp_path):
    runs_of = {
        "target": ["target"],
        "draft": ["drafter", "with"],
        "comparison": ["drafter", "without"],
    }
    for name, runs in runs_of.items():
        (tmp_path / name).mkdir()
        marked = [
            {"step": i, "folder": name, **({"run": r} if name != "target" else {})}
            for r in runs
            for i in range(250)
        ]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in marked))
    folders = [tmp_path / name for name in ("target", "draft", "comparison")]
    lines = assemble.training_log(*folders[:2], None, folders[2])
    assert {(line["run"], line["folder"]) for line in lines} == {
        ("target", "target"),
        ("drafter", "draft"),
        ("without", "comparison"),
    }
    for run in ("target", "drafter", "without"):
        steps = [line["step"] for line in lines if line["run"] == run]
        assert len(steps) == 100
        assert steps[0] == 0
        assert steps[-1] == 249
        assert steps == sorted(set(steps))
    assert assemble.thinned(lines[:3], 100) == lines[:3]
    further = assemble.training_log(*folders[:2], folders[1], folders[2])
    assert {line["run"] for line in further} == {"target", "drafter", FURTHER_RUN, "without"}


def test_bundled_model_is_within_its_sizes():
    sizes = measure_sizes(BUNDLE)
    assert sizes.target <= 12 * MIB
    assert sizes.folder + (BUNDLE / CARD).stat().st_size <= 16 * MIB
    stored = (BUNDLE / "model.safetensors").stat().st_size
    assert 0 < stored - sizes.target - sizes.draft < MIB / 4


def test_bundled_card_and_log_belong_to_the_checkpoint():
    sizes, card = measure_sizes(BUNDLE), (BUNDLE / CARD).read_text(encoding="utf-8")
    assert f"| 14.95 M | {sizes.target / MIB:.2f} |" in card
    assert f"| {sizes.draft / MIB:.2f} |" in card
    lines = [json.loads(line) for line in (BUNDLE / LOG).read_text().splitlines()]
    last = {line["run"]: line["step"] for line in lines}
    assert set(last) - {FURTHER_RUN} == {
        "target",
        "drafter",
        "with transition",
        "without transition",
    }
    assert f"trained for {last['target']} steps" in card
    assert f"trained apart for {last['with transition']} steps" in card
    assert last["with transition"] == last["without transition"]


def test_too_large_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "MAX_FOLDER_BYTES", 1000)
    monkeypatch.setattr(assemble, "read_build", lambda *folders: build())
    bundle, draft = tmp_path / "bundle", tmp_path / "draft"
    bundle.mkdir()
    (draft / "checkpoint").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (draft / "checkpoint" / name).write_bytes(b"x")
    (draft / "log.jsonl").write_text("")
    flags = assemble.AssembleFlags(target=draft, draft=draft, bundle=bundle)
    with pytest.raises(ValueError, match="more than"):
        assemble.main(flags)
    assert not (bundle / CARD).exists()
