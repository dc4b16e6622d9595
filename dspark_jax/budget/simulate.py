"""`python -m dspark_jax.budget.simulate`: what verification policies gain, without a model or a
device.

Plays recorded or synthetic confidences against a cost table, for ordinary decoding, fixed draft
lengths and adaptive verification, over a range of concurrencies. Only what the table prices is in
the clock: no host work, no scheduling gaps; absolute throughput is therefore an upper bound, the
comparison of policies is what to look at.
"""

import importlib.util
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dspark_jax.budget.cost_profile import read_profile
from dspark_jax.budget.cost_table import CostTable
from dspark_jax.budget.optimizer import BudgetLimits, BudgetPolicy, logit_rows_in_chunk
from dspark_jax.budget.published import EXTENSION_NOTE, published_curves
from dspark_jax.budget.replay import Arm, ArmResult, Load, replay
from dspark_jax.budget.traces import (
    FLASH_SURVIVAL,
    RecordedTrace,
    SyntheticTrace,
    Trace,
    load_recorded,
)

PUBLISHED_LIMITS = {"published-1024": 1024, "published-4096": 4096}


@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """Compare verification policies on a cost table."""

    table: Literal["published-1024", "published-4096"] = "published-1024"
    """Published times (DeepSeek-V4-Flash, four B300), captured up to this many tokens."""
    profile: Path | None = None
    """A stored cost profile to use instead."""
    profile_capture_limit: int | None = None
    """Largest token count of --profile that pads to a compiled shape; default: all do."""
    confidences: Path | None = None
    """Recorded confidences, .npz or JSON lines, instead of synthetic ones."""
    survival: tuple[float, ...] = FLASH_SURVIVAL
    """Mean survival of each position, for synthetic confidences."""
    arms: tuple[str, ...] = ("none", "fixed-5", "fixed-7", "adaptive")
    """none, fixed-N (N drafts of each request), adaptive."""
    prompt_cost: Literal["sunk", "shared"] = "sunk"
    """Who pays for prompt tokens in an adaptive step: nobody, or all its tokens, as in vLLM."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Requests at a time."""
    prompt_len: int = 256
    """Tokens per prompt."""
    output_len: int = 512
    """Tokens generated per request."""
    num_steps: int = 300
    """Steps per arm and concurrency, or more if that takes --min-proposals."""
    min_proposals: int = 4000
    """Proposals per arm and concurrency, so that few requests at a time are a fair sample too."""
    context_len: float = 8192.0
    """Mean context, for profiles of several contexts."""
    vocab_size: int = 129_280
    """Bounds the rows of logits of a step to 1 GiB of float32."""
    seed: int = 0
    """Of everything random; all arms see the same seed."""
    output: Path = Path("simulation.json")
    """Where to write the results."""
    plot: Path | None = None
    """Picture to draw (needs matplotlib)."""


def simulate(flags: SimulateFlags) -> list[ArmResult]:
    """Runs every arm at every concurrency.

    Raises:
        ValueError: a flag doesn't make sense.
        OSError: a file can't be read.
    """
    arms = [parse_arm(name, flags.prompt_cost) for name in flags.arms]
    recorded = None if flags.confidences is None else load_recorded(flags.confidences)
    limits = BudgetLimits(max_logit_rows=logit_rows_in_chunk(flags.vocab_size))
    cost = _cost_table(flags)
    results = []
    for concurrency in flags.concurrency:
        load = Load(
            concurrency=concurrency,
            prompt_len=flags.prompt_len,
            output_len=flags.output_len,
            num_steps=max(flags.num_steps, flags.min_proposals // max(concurrency, 1)),
        )
        for arm in arms:
            rng = np.random.default_rng(flags.seed)
            trace: Trace
            if recorded is None:
                trace = SyntheticTrace(concurrency, flags.survival, rng)
            else:
                trace = RecordedTrace(concurrency, *recorded, rng)
            if arm.draft_len is not None and arm.draft_len > trace.draft_len:
                raise ValueError(
                    f"{arm.name} offers more than the {trace.draft_len} drafts there are"
                )
            stagger = np.random.default_rng(flags.seed)
            results.append(replay(arm, load, trace, cost, flags.context_len, limits, stagger))
    return results


def parse_arm(name: str, prompt_cost: Literal["sunk", "shared"] = "sunk") -> Arm:
    """none, adaptive, or fixed-N."""
    if name == "none":
        return Arm(name=name, policy=BudgetPolicy(mode="none"))
    if name == "adaptive":
        return Arm(name=name, policy=BudgetPolicy(prompt_cost=prompt_cost))
    match = re.fullmatch(r"fixed-([1-9]\d*)", name)
    if match is None:
        raise ValueError(f"arm must be none, fixed-N or adaptive, got {name!r}")
    return Arm(name=name, policy=BudgetPolicy(mode="fixed"), draft_len=int(match[1]))


def format_table(results: list[ArmResult]) -> str:
    """Results as text, one line per arm and concurrency, with the gain over ordinary decoding."""
    plain = {r.concurrency: r.tokens_per_s for r in results if r.arm == "none"}
    lines = [
        f"{'requests':>8} {'arm':>9} {'tokens/s':>9} {'vs none':>8} {'ms/token':>8} "
        f"{'accepted':>8} {'budget':>7} {'tokens':>7} {'step ms':>8} {'skipped':>7}"
    ]
    for r in results:
        gain = (
            f"{r.tokens_per_s / plain[r.concurrency] - 1:+.0%}" if r.concurrency in plain else "-"
        )
        lines.append(
            f"{r.concurrency:>8} {r.arm:>9} {r.tokens_per_s:>9.0f} {gain:>8} {r.token_ms:>8.2f} "
            f"{r.accepted_len:>8.2f} {r.budget:>7.1f} {r.step_tokens:>7.1f} {r.step_ms:>8.2f} "
            f"{r.skipped:>7.0%}"
        )
    return "\n".join(lines)


def notes(flags: SimulateFlags) -> list[str]:
    """What a reader must know about the numbers."""
    lines = ["the clock holds verification and drafting as priced by the table, and nothing else"]
    if flags.profile is None and PUBLISHED_LIMITS[flags.table] > 1024:
        lines.append(EXTENSION_NOTE)
    if flags.confidences is None:
        lines.append("confidences are synthetic, and calibrated by construction")
    return lines


def draw(results: list[ArmResult], title: str, path: Path) -> None:
    """Throughput and drafts per request over concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    throughput, depth = figure.subplots(1, 2)
    for arm in dict.fromkeys(r.arm for r in results):
        rows = [r for r in results if r.arm == arm]
        at = [r.concurrency for r in rows]
        throughput.plot(at, [r.tokens_per_s for r in rows], marker="o", label=arm)
        depth.plot(at, [r.budget / r.concurrency for r in rows], marker="o", label=arm)
    throughput.set(yscale="log", ylabel="output tokens/s")
    depth.set(ylabel="drafts verified per request")
    ticks = sorted({r.concurrency for r in results})
    for axes in (throughput, depth):
        axes.grid(alpha=0.3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("requests at a time")
    throughput.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main(flags: SimulateFlags) -> None:
    """Simulates, prints, writes, draws."""
    if flags.plot is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("error: --plot needs matplotlib: pip install matplotlib")
    try:
        results = simulate(flags)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    title = flags.table if flags.profile is None else flags.profile.name
    print(f"cost table: {title}")
    print(format_table(results))
    for line in notes(flags):
        print(f"note: {line}")
    document: dict[str, Any] = {
        "flags": asdict(flags),
        "notes": notes(flags),
        "results": [asdict(r) for r in results],
    }
    flags.output.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"wrote {flags.output}")
    if flags.plot is not None:
        draw(results, title, flags.plot)
        print(f"wrote {flags.plot}")


def _cost_table(flags: SimulateFlags) -> CostTable:
    if flags.profile is None:
        limit = PUBLISHED_LIMITS[flags.table]
        curves = [published_curves(limit)]
    else:
        limit = flags.profile_capture_limit
        curves = list(read_profile(flags.profile))
    return CostTable(
        curves,
        max_tokens=max(max(c.verify) for c in curves),
        max_requests=max(flags.concurrency),
        capture_limit=limit,
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(SimulateFlags, prog="python -m dspark_jax.budget.simulate"))
