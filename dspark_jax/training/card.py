"""The bundled model's card: Markdown from what the build measured, and from nothing else."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from dspark_jax.config import AttentionKind
from dspark_jax.draft.params import draft_specs
from dspark_jax.model.params import Spec, param_specs
from dspark_jax.training.evaluate import as_markdown
from dspark_jax.training.results import Build, aims

MIB = 1 << 20
_WIDTH = 110


def model_card(build: Build) -> str:
    """The whole card as Markdown."""
    sections = (
        _introduction,
        _architecture,
        _sizes,
        _making,
        _target,
        _drafter,
        _calibration,
        _transition,
        _aims,
        _limits,
        _text,
    )
    blocks = "\n\n".join(section(build) for section in sections).split("\n\n")
    return "\n\n".join(_filled(block) for block in blocks) + "\n"


def _introduction(build: Build) -> str:
    sampled, greedy = (build.draft["evaluation"][name] for name in ("sampled", "greedy"))
    return f"""# The bundled model

A small DeepSeek-V4 with a DSpark drafter, trained on the standard library of CPython so that the server, the tests
and the notebooks run on real text. It writes plausible Python and short answers about library functions; it knows
nothing else. On held-out prompts a round of drafting and full verification yields
{sampled["accepted_length"]:.3f} tokens at temperature 1 and {greedy["accepted_length"]:.3f} at temperature 0.

This page is written by `dspark_jax/training/card.py` from the figures that the build measured; all are of a single
run with seed {build.draft["flags"]["seed"]}."""


def _architecture(build: Build) -> str:
    cfg, draft = build.cfg, build.cfg.draft
    assert draft is not None
    kinds = [cfg.attention_kinds.count(kind) for kind in AttentionKind]
    layers = ", ".join(f"{n} {kind.value}" for n, kind in zip(kinds, AttentionKind))
    rows = [
        ["vocabulary", f"{cfg.vocab_size}, byte-level BPE"],
        ["width, streams", f"{cfg.hidden_size}, {cfg.hc_mult}"],
        ["layers", f"{cfg.num_hidden_layers}: {layers}"],
        ["heads", f"{cfg.num_attention_heads} × {cfg.head_dim}, {cfg.qk_rope_head_dim} rotary"],
        [
            "compression",
            f"{cfg.csa_ratio} and {cfg.hca_ratio} to 1, window {cfg.sliding_window}, "
            f"indexer {cfg.index_n_heads} × {cfg.index_head_dim}, top {cfg.index_topk}",
        ],
        [
            "experts",
            f"{cfg.n_routed_experts} of width {cfg.moe_intermediate_size}, "
            f"{cfg.num_experts_per_tok} per token and a shared one, {cfg.num_hash_layers} layer hash-routed",
        ],
        ["positions", str(cfg.max_position_embeddings)],
        [
            "drafter",
            f"{draft.num_stages} stages, {draft.block_size} positions, Markov rank {draft.markov_rank}, "
            f"taps behind layers {', '.join(map(str, draft.target_layer_ids))} (from 0)",
        ],
    ]
    return "## Architecture\n\n" + _table(["part", "shape"], rows)


def _sizes(build: Build) -> str:
    target, draft, folder = build.sizes
    params = [_num_params(specs(build.cfg)) for specs in (param_specs, draft_specs)]
    rows = [
        ["target", _millions(params[0]), f"{target / MIB:.2f}"],
        ["drafter", _millions(params[1]), f"{draft / MIB:.2f}"],
        ["folder, tokenizer and prompts included", "", f"{folder / MIB:.2f}"],
    ]
    return f"""## Sizes

{_table(["", "parameters", "MiB"], rows)}

Stored as DeepSeek-V4 is released: names, fp8 blocks of 128 × 128 with power-of-two scales, packed fp4 experts,
bf16. The projections of the hyper-connections are bf16 here and float32 there; the loader goes by what the file
says. The drafter shares embedding and output head with the target."""


def _making(build: Build) -> str:
    target, draft = build.target, build.draft
    parts, comparison = draft["parts_s"], build.comparison["comparison"]
    compared = sum(run["training"]["train_s"] for run in comparison.values())
    rows = [
        ["target, training", f"{target['train_s']:.0f}"],
        ["drafter, text written by the target", f"{parts['sampling']:.0f}"],
        ["drafter, training", f"{draft['training']['train_s']:.0f}"],
        ["two short drafters for comparison, training", f"{compared:.0f}"],
        ["drafter's stage, everything", f"{sum(parts.values()):.0f}"],
    ]
    runs = [draft]
    if build.first:
        runs.insert(0, build.first)
        rows.insert(1, ["first drafter, training", f"{build.first['training']['train_s']:.0f}"])
    commands = _draft_commands(build)
    steps = " and ".join(
        f"{run['training']['steps']} steps on {_millions(run['sampled_tokens'])} tokens"
        for run in runs
    )
    return f"""## Making it again

```
python -m dspark_jax.training.corpus
python -m dspark_jax.training.tokenizer
python -m dspark_jax.training.prompts
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
python -m dspark_jax.training.pipeline --stage target --target-minutes {target["flags"]["max_minutes"]:g}
{commands}
```

On one {target["device"]} with JAX {target["jax"]}, in seconds:

{_table(["part", "s"], rows)}

The target was trained for {target["steps"]} steps, {_millions(target["tokens"])} tokens in all; the drafter for
{steps} that the target had written at temperature 1. Losses over time are in `training_log.jsonl`."""


def _draft_commands(build: Build) -> str:
    """The drafter's stage, the run that trained it further if there was one, the comparison's, and what ships."""
    stage = "python -m dspark_jax.training.pipeline --stage"
    flags = build.draft["flags"]
    times = (build.first or build.draft)["flags"]["times"]
    compared = build.comparison["flags"]["times"]
    lines = [f"{stage} draft {_draft_times(times)}"]
    further = ""
    if build.first:
        behind = " ".join(str(n) for n in flags["behind"])
        lines.append(
            "python -m dspark_jax.training.draft_stage --initial out/draft/checkpoint --out out/further \\\n"
            f"    --behind {behind} --training.peak {flags['training']['peak']:g} "
            f"--seed {flags['seed']} \\\n"
            f"    {_draft_times(flags['times'], 'times')}"
        )
        further = " \\\n    --draft-folder out/further --first out/draft"
    if compared != times:
        lines.append(
            f"{stage} draft {_draft_times(compared)} \\\n    --target out/target --out out/comparison"
        )
    apart = " --comparison out/comparison/draft" if compared != times else ""
    return "\n".join([*lines, f"{stage} assemble{apart}{further}"])


def _draft_times(times: dict[str, float], group: str = "draft") -> str:
    return (
        f"--{group}.train-seconds {times['train_seconds']:g} \\\n"
        f"    --{group}.compare-seconds {times['compare_seconds']:g} "
        f"--{group}.deadline-seconds {times['deadline_seconds']:g}"
    )


def _target(build: Build) -> str:
    exact, rounded = build.target["held_out"], build.target["held_out_rounded"]
    rows = [
        [
            kind,
            f"{exact[kind]['unigram_perplexity']:.0f}",
            f"{exact[kind]['perplexity']:.2f}",
            f"{rounded[kind]['perplexity']:.2f}",
            f"{rounded[kind]['nats'] - exact[kind]['nats']:+.3f}",
            f"{exact[kind]['unigram_bits_per_byte']:.2f}",
            f"{rounded[kind]['bits_per_byte']:.2f}",
        ]
        for kind in exact
    ]
    header = [
        "held-out text",
        "unigram perplexity",
        "before rounding",
        "rounded",
        "cost, nats per token",
        "unigram, bits per byte",
        "rounded, bits per byte",
    ]
    return f"""## Target: held-out perplexity

{_table(header, rows)}

Rounding is plain, after training. "Rounded" is the target as its own stage exports it, to fp8, fp4 and bf16 but
with the hyper-connections' projections in float32. Acceptance and calibration below were measured with the file as
it ships."""


def _drafter(build: Build) -> str:
    evaluation, flags = build.draft["evaluation"], build.draft["flags"]
    kinds = sorted(evaluation["sampled"]["accepted_length_by_kind"])
    rows = [
        [title, *(f"{evaluation[name]['accepted_length_by_kind'][kind]:.3f}" for kind in kinds)]
        for name, title in (("sampled", "temperature 1"), ("greedy", "temperature 0"))
    ]
    cost = build.draft["multiply_adds"]
    return f"""## Drafter: acceptance on held-out prompts

Sequences of {flags["length"]} tokens, written by the target behind the prompts of `prompts.jsonl`; every
proposal is verified in full, computing in {flags["training"]["compute_dtype"]}. Acceptance is conditional on
the prefix, survival is not; the accepted length includes the target's own token.

{as_markdown(evaluation).rstrip()}

{_table(["accepted length", *kinds], rows)}

A drafted position costs {_millions(cost["draft_slot"])} multiply-adds and a token of the target
{_millions(cost["target_token"])} (context 1024, routed experts only). One proposal with its context rows costs
{cost["draft_share"]:.1%} of verifying it."""


def _calibration(build: Build) -> str:
    sampled, greedy = (build.draft["evaluation"][name] for name in ("sampled", "greedy"))
    positions = [str(k + 1) for k in range(len(build.calibration["scale"]))]
    rows = [[name, *(f"{x:+.3f}" for x in build.calibration[name])] for name in ("scale", "offset")]
    worst = {
        (name, state): max(report[state]["survival_error"])
        for name, report in (("sampled", sampled), ("greedy", greedy))
        for state in ("raw", "calibrated")
    }
    errors = (greedy[state]["survival_error"] for state in ("raw", "calibrated"))
    worse = sum(after > before for before, after in zip(*errors))
    return f"""## Calibration

A scale and an offset per position, fitted at temperature 1 behind held-out prompts that are not in
`prompts.jsonl`, and stored with the drafter:

{_table(["position", *positions], rows)}

The largest survival error over positions at temperature 1 falls from {worst["sampled", "raw"]:.3f} to
{worst["sampled", "calibrated"]:.3f}; perfect predictions would show up to
{max(sampled["calibrated"]["floor"]):.3f}, because labels are random. At temperature 0 it is
{worst["greedy", "raw"]:.3f} before and {worst["greedy", "calibrated"]:.3f} after, and {worse} of {len(positions)}
positions get worse: acceptance is another event there, on which nothing was fitted; confidences are a
ranking then."""


def _transition(build: Build) -> str:
    runs = build.comparison["comparison"]
    if not runs:
        return "## The Markov head\n\nNo comparison was run."
    steps = runs["with"]["training"]["steps"]
    positions = len(runs["with"]["sampled"]["acceptance"])
    rows = [
        [
            f"{name} Markov head",
            f"{run['sampled']['accepted_length']:.3f}",
            *(f"{x:.3f}" for x in run["sampled"]["survival"]),
        ]
        for name, run in runs.items()
    ]
    header = ["", "accepted length", *(f"survival {k + 1}" for k in range(positions))]
    return f"""## The Markov head

Two drafters trained apart for {steps} steps each, judged at temperature 1 before rounding:

{_table(header, rows)}"""


def _aims(build: Build) -> str:
    found = aims(build)
    rows = [
        [aim.name, aim.wanted, f"{aim.reached:.3f}", "yes" if aim.is_met else "**no**"]
        for aim in found
    ]
    missed = [aim.name for aim in found if not aim.is_met]
    verdict = f"Missed: {', '.join(missed)}." if missed else "All were reached."
    return f"""## What was wanted and what was reached

{_table(["at temperature 1, held-out prompts", "wanted", "reached", "met"], rows)}

{verdict}"""


def _limits(build: Build) -> str:
    target, draft = build.target, build.draft
    seen, held_out = target["last"]["nats"], target["held_out"]
    lowest, highest = (f(kind["nats"] for kind in held_out.values()) for f in (min, max))
    epochs = target["tokens"] / sum(target["train_tokens"].values())
    trained = draft["training"]["acceptance"][0]
    reached = draft["evaluation"]["sampled"]["acceptance"][0]
    return f"""## Limits

- The target overfits: {epochs:.1f} times its text, a loss of {seen:.2f} nats in its last training batch against
  {lowest:.2f} to {highest:.2f} on held-out text.
- So does the drafter, less: acceptance at position 1 is {trained:.3f} in its last training batch and
  {reached:.3f} on held-out prompts. Part of that is where blocks begin: evenly spread in training, behind a
  rejection in decoding.
- The target was trained on rows of {target["flags"]["length"]} tokens, the drafter on text behind as many as
  {max(draft["behind"])}; {build.cfg.max_position_embeddings} positions are configured.
- It is small and knows one library: it is there to exercise code, and its answers are not to be relied on."""


def _text(build: Build) -> str:
    tokens = ", ".join(f"{_millions(n)} {kind}" for kind, n in build.target["train_tokens"].items())
    return f"""## Text and licence

Source files and docstrings of CPython's standard library, read from the interpreter that built the corpus;
nothing was downloaded. Training tokens by kind: {tokens}. `held_out.txt` lists the {build.num_held_out} files kept
out of training ("{build.held_out_header}"), and `drafting.txt` those of which only the drafter has seen anything:
its text was written behind their prefixes. The text is under the PSF licence, in `LICENSE-PSF`; the weights are
under the licence of this repository."""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _filled(block: str) -> str:
    """Prose and lists in lines of one length; headings, tables and code as they are."""
    if block.startswith(("#", "|", "```")):
        return block
    fill = functools.partial(textwrap.fill, width=_WIDTH, break_on_hyphens=False)
    prose, *items = (" ".join(item.split()) for item in f"\n{block}".split("\n- "))
    lines = [fill(prose)] if prose else []
    return "\n".join(lines + [fill(f"- {item}", subsequent_indent="  ") for item in items])


def _num_params(specs: Any) -> int:
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Spec))
    return sum(math.prod(spec.shape) for spec in leaves)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"
