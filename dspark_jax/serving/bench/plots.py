"""The two pictures of a sweep. matplotlib comes with the `notebooks` extra."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arms import arm_rank, fixed_len
from .report import interactivity

if TYPE_CHECKING:
    pass

Summaries = Mapping[tuple[str, int], Mapping[str, Any]]
Value = Callable[[Mapping[str, Any]], float | None]


def require_matplotlib() -> None:
    """Raises ModuleNotFoundError, naming the remedy, when matplotlib isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "the pictures need matplotlib: pip install 'dspark-jax[notebooks]', or pass --no-plots"
        )


def draw_pareto(summaries: Summaries, path: Path) -> None:
    """Output throughput against interactivity, a line per arm through its concurrencies.

    Up is more work done by the machine, right is a faster stream for each user; an arm that lies
    above and right of another is better whichever of the two matters.

    Args:
        summaries: (arm, concurrency) → result.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for arm in _arms(summaries):
        points = _series(summaries, arm, interactivity, _value("output_throughput"))
        if not points:
            continue
        axes.plot([x for _, x, _ in points], [y for _, _, y in points], label=arm, **_style(arm))
        if arm in _labelled_arms(summaries):
            for concurrency, x, y in points:
                axes.annotate(
                    str(concurrency), (x, y), xytext=(5, 5), textcoords="offset points",
                    fontsize=8, color=_style(arm)["color"],
                )  # fmt: skip
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.legend(fontsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis)
    axes.set_xlabel("interactivity: output tokens/s per user (1 / median time per output token)")
    axes.set_ylabel("throughput: output tokens/s")
    axes.set_title("Throughput against interactivity (numbers: requests in flight)", fontsize=11)
    figure.savefig(path, dpi=150)


def draw_speculation(summaries: Summaries, path: Path) -> None:
    """What adaptive verification chooses, against concurrency: budget, depth, accepted length.

    Args:
        summaries: (arm, concurrency) → result. Results without speculation are left out: their
            budget of 0 is no choice.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    summaries = {k: r for k, r in summaries.items() if "spec_decode_num_drafts" in r}
    panels: list[tuple[str, str, bool]] = [
        ("budget: draft tokens verified per step", "dspark_verification_budget", True),
        ("draft tokens verified per request and step", "dspark_verify_len", False),
        ("accepted length (tokens per request and step)", "spec_decode_acceptance_length", False),
    ]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels))
    for axes, (title, key, is_log) in zip(grid, panels, strict=True):
        concurrencies: set[int] = set()
        for arm in _arms(summaries):
            points = _series(summaries, arm, _value("max_concurrency"), _value(key))
            if not points:
                continue
            concurrencies.update(concurrency for concurrency, _, _ in points)
            axes.plot(
                [x for _, x, _ in points], [y for _, _, y in points], label=arm, **_style(arm)
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(concurrencies), [str(c) for c in sorted(concurrencies)], fontsize=8)
        axes.minorticks_off()
        if is_log:
            axes.set_yscale("symlog", base=2, linthresh=1)  # a budget of 0 is a choice too
            _plain_ticks(axes.yaxis)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests in flight")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
    handles, labels = grid[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=150)


def _arms(summaries: Summaries) -> list[str]:
    return sorted({arm for arm, _ in summaries}, key=arm_rank)


def _labelled_arms(summaries: Summaries) -> Sequence[str]:
    """Concurrencies are written at the outermost lines only; between them they would collide."""
    arms = _arms(summaries)
    return [arm for arm in ("none", "adaptive") if arm in arms] or arms[-1:]


def _value(key: str) -> Value:
    return lambda result: result.get(key)


def _series(
    summaries: Summaries, arm: str, x_of: Value, y_of: Value
) -> list[tuple[int, float, float]]:
    """(concurrency, x, y) of an arm by ascending concurrency, where both values exist."""
    points = [
        (c, x_of(result), y_of(result)) for (name, c), result in summaries.items() if name == arm
    ]
    return sorted((c, x, y) for c, x, y in points if x is not None and y is not None)


def _style(arm: str) -> dict[str, Any]:
    """Grey without speculation, light to dark for growing fixed lengths, red for adaptive."""
    from matplotlib import colormaps

    style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4}
    if arm == "none":
        return {**style, "color": "0.35", "linestyle": "--"}
    if arm == "adaptive":
        return {**style, "color": "crimson", "linewidth": 2.4, "markersize": 6, "zorder": 3}
    shade = min(fixed_len(arm) or 1, 8) / 8
    return {**style, "color": colormaps["viridis_r"](0.1 + 0.85 * shade)}


def _plain_ticks(axis: Any) -> None:
    """Ticks as ordinary numbers instead of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.axes.grid(alpha=0.25, which="major")
