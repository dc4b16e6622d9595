"""Tables and pictures of `benchmarks.flash_sweep`, with the ratios that vLLM published beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flash_model import FLASH
from benchmarks.published_sweeps import FLASH_CAPTURE_1024, PRO_FULL_CAPTURE, Sweep
from benchmarks.result import markdown_table
from benchmarks.step_floor import Options as FloorOptions
from benchmarks.step_floor import tables
from dspark_jax.serving.bench.arms import arm_rank, fixed_len
from dspark_jax.serving.bench.plots import draw_pareto, draw_speculation

Results = dict[tuple[str, int], Mapping[str, Any]]
"""(arm, concurrency) -> result, of one scenario and capture limit."""

_DRAWN = {"pareto": draw_pareto, "budget": draw_speculation}
_RATIOS = (("adaptive", "fixed-7"), ("adaptive", "none"), ("fixed-7", "none"))


def flash_tables(data: Mapping[str, Any]) -> str:
    """The file as Markdown: throughput and ratios of every scenario and capture limit, then the starts."""
    lines = []
    for scenario, settings in data["settings"].items():
        for capture in captures(data, scenario):
            results = results_of(data, scenario, capture)
            lines.append(f"**{scenario}, step sizes fine up to {capture} tokens**\n")
            lines.append(markdown_table(_throughput(results)))
            ratios = _ratios(results, _published(capture, settings["max_num_seqs"], settings))
            if ratios:
                lines.append(markdown_table(ratios))
            lines.extend([*_verdicts(results), ""])
            for name in _DRAWN if _has_a_curve(results) else ():
                lines.append(f"![{name}](pictures/{_picture(scenario, capture, name)})\n")
        prompts = f"random prompts of {settings['input_len']}"
        if settings.get("dataset") == "bundled":
            prompts = "the bundled model's held-out prompts"
        lines.append(
            f"\n{settings['layers'] or 'All'} layers, {prompts} and outputs of "
            f"{settings['output_len']} tokens, {settings['prompts_per_stream']} per stream, temperature "
            f"{settings['temperature']:g}, acceptance {settings['acceptance']}.\n"
        )
        lines.append(_floors(data, scenario, settings))
        if _curves(data, scenario):
            lines.append(f"![step times](pictures/{_cost_picture(scenario)})\n")
    lines.extend(_start(start) for start in data["starts"])
    return "\n".join(lines) + "\n"


def _has_a_curve(results: Results) -> bool:
    """Whether there is more than one concurrency: a single one is no picture."""
    return len({concurrency for _, concurrency in results}) > 1


def captures(data: Mapping[str, Any], scenario: str) -> list[int]:
    """Capture limits that a scenario was measured with, the largest first."""
    found = {point["capture"] for point in data["flash_points"] if point["scenario"] == scenario}
    return sorted(found, reverse=True)


def results_of(data: Mapping[str, Any], scenario: str, capture: int) -> Results:
    """Results by arm and concurrency.

    Under a smaller limit, points whose steps stay below it are those of the largest limit: the programs are the
    same.
    """
    largest = captures(data, scenario)[0]
    draft_len = data["settings"][scenario]["draft_len"]
    results: Results = {}
    for point in data["flash_points"]:
        if point["scenario"] != scenario:
            continue
        arm, concurrency = point["arm"], point["concurrency"]
        is_own = point["capture"] == capture
        tokens = concurrency * (_verified(arm, draft_len) + 1)
        if is_own or (point["capture"] == largest and tokens <= capture):
            results[arm, concurrency] = point["result"]
    return results


def draw_pictures(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """For every scenario its cost staircase, and for every limit the Pareto and the budget; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for scenario in data["settings"]:
        if curves := _curves(data, scenario):
            paths.append(folder / _cost_picture(scenario))
            draw_cost(curves, paths[-1])
        for capture in captures(data, scenario):
            results = results_of(data, scenario, capture)
            for name, draw in _DRAWN.items() if _has_a_curve(results) else ():
                paths.append(folder / _picture(scenario, capture, name))
                draw(results, paths[-1])
    return paths


def draw_cost(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Step time against tokens and drafting time against requests, as measured at start: a stair per bucket."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    verify, draft = figure.subplots(1, 2)
    for curve in sorted(curves, key=lambda c: c["context_len"]):
        for axes, name in ((verify, "verify"), (draft, "draft")):
            counts, times = zip(*curve[name])
            axes.step(
                [0, *counts],
                [times[0], *times],
                where="pre",
                label=f"context {curve['context_len']}",
            )
            axes.plot(counts, times, ".", color="0.3", markersize=4)
    for axes, title, label in (
        (verify, "verifying half of a step", "tokens in the step"),
        (draft, "drafting half", "requests"),
    ):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _curves(data: Mapping[str, Any], scenario: str) -> Sequence[Mapping[str, Any]]:
    """Step times that a scenario's server measured at its last start that measured any.

    None for a server that took them from the profile which an earlier scenario's had stored: they are shown there.
    """
    last = {start["scenario"]: start["curves"] for start in data["starts"] if start["curves"]}
    names = list(data["settings"])
    earlier = [last.get(name) for name in names[: names.index(scenario)]]
    return () if last.get(scenario) in earlier else last.get(scenario, ())


def _cost_picture(scenario: str) -> str:
    return f"flash_{scenario}_cost.png"


def _picture(scenario: str, capture: int, name: str) -> str:
    return f"flash_{scenario}_{capture}_{name}.png"


def _floors(data: Mapping[str, Any], scenario: str, settings: Mapping[str, Any]) -> str:
    """Step times that the scenario's server measured at start, over what they must at least be."""
    model = FLASH.parent / settings["model"]
    curves = _curves(data, scenario)
    if not curves or not (model / "config.json").exists():
        return ""
    options = FloorOptions(
        model=model,
        layers=settings["layers"],
        draft_len=settings["draft_len"],
        buckets=tuple(settings["capture_sizes"]),
        max_num_seqs=settings["max_num_seqs"],
        context_len=max(curve["context_len"] for curve in curves),
        scenario=scenario,
    )
    return tables(options, data["starts"])


def _throughput(results: Results) -> list[dict[str, Any]]:
    rows = []
    for arm, concurrency in sorted(results, key=lambda key: (key[1], arm_rank(key[0]))):
        result = results[arm, concurrency]
        buckets = result["steps_by_bucket"]
        steps = sum(row["steps"] for row in buckets)
        device_ms = sum(row["steps"] * row["step_ms"] for row in buckets)
        rows.append(
            {
                "concurrency": concurrency,
                "arm": arm,
                "output tok/s": result["output_throughput"],
                "TPOT ms": result["median_tpot_ms"],
                "accepted length": result.get("spec_decode_acceptance_length"),
                "verified per draft": result.get("dspark_verify_len"),
                "budget per step": result.get("dspark_verification_budget"),
                "ms per step": device_ms / steps if steps else None,
                "host ms per step": result.get("dspark_median_host_time_ms"),
                "of it launching": result.get("dspark_median_launch_time_ms"),
                "outside steps": max(0.0, 1 - device_ms / 1e3 / result["duration"]),
            }
        )
    return rows


def _published(capture: int, max_num_seqs: int, settings: Mapping[str, Any]) -> tuple[str, Sweep]:
    """The published sweep whose capture limit is like ours: below or at every decoding step."""
    is_full = capture >= (settings["draft_len"] + 1) * max_num_seqs
    if is_full:
        return "Pro, full capture", PRO_FULL_CAPTURE
    return "Flash, 1024", FLASH_CAPTURE_1024


def _ratios(results: Results, published: tuple[str, Sweep]) -> list[dict[str, Any]]:
    name, sweep = published
    rows = []
    for concurrency in sorted({c for _, c in results}):
        row: dict[str, Any] = {"concurrency": concurrency}
        for top, bottom in _RATIOS:
            ours = [
                results[arm, concurrency]["output_throughput"]
                for arm in (top, bottom)
                if (arm, concurrency) in results
            ]
            theirs = sweep.get(concurrency)
            row[f"{top} / {bottom}"] = ours[0] / ours[1] if len(ours) == 2 else None
            # Columns of a table need names of their own.
            row[f"{top} / {bottom}, {name}"] = theirs[top] / theirs[bottom] if theirs else None
        rows.append(row)
    return rows


def _verdicts(results: Results) -> list[str]:
    lines = []
    for concurrency in sorted({c for _, c in results}):
        others = {
            arm: result["output_throughput"]
            for (arm, c), result in results.items()
            if c == concurrency and arm != "adaptive"
        }
        adaptive = results.get(("adaptive", concurrency))
        if adaptive and others:
            best = max(others, key=lambda arm: others[arm])
            ratio = adaptive["output_throughput"] / others[best]
            lines.append(
                f"- Adaptive at concurrency {concurrency}: {ratio:.3f} of the best other arm, {best}."
            )
    return lines


def _verified(arm: str, draft_len: int) -> int:
    if arm == "none":
        return 0
    return fixed_len(arm) or draft_len


def _start(start: Mapping[str, Any]) -> str:
    device = ", ".join(start["gpus"]) or start["platform"]
    memory = f" {start['memory'].partition('memory in GiB: ')[2]} GiB." if start["memory"] else ""
    return (
        f"- Server of {start['scenario']}, {start['date']}: up after {start['start_s']:.0f} s; {device}, "
        f"{start['cores']} cores, Python {start['python']}, jax {start['jax']}.{memory}"
    )
