"""A picture of the allocation: three requests with seven drafts, the best 11 of the 21 slots.

`python benchmarks/illustration.py` writes docs/pictures/allocation_21_slots.png.
"""

import itertools
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dspark_jax.budget import allocate

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "allocation_21_slots.png"
BUDGET = 11
CONFIDENCES = np.array(
    [
        [0.97, 0.95, 0.94, 0.92, 0.90, 0.88, 0.85],
        [0.85, 0.80, 0.75, 0.70, 0.60, 0.55, 0.50],
        [0.60, 0.50, 0.45, 0.40, 0.35, 0.30, 0.25],
    ],
    dtype=np.float32,
)
LABELS = ("request A\npredictable text", "request B\nordinary text", "request C\nhard text")


def draw(confidences: np.ndarray, budget: int) -> Figure:
    """Slots coloured by survival, numbered in order of admission, the admitted ones framed."""
    num_requests, draft_len = confidences.shape
    draft_lens = np.full(num_requests, draft_len)
    survival = np.cumprod(confidences, axis=1)
    # The slot that a larger budget adds is the next in the order.
    lens = [allocate(confidences, draft_lens, b) for b in range(confidences.size + 1)]
    verify_lens = lens[budget]

    figure = Figure(figsize=(9, 3.9), layout="constrained")
    axes = figure.subplots()
    for order, (before, after) in enumerate(itertools.pairwise(lens), start=1):
        row = int(np.argmax(after - before))
        position = int(before[row])
        is_admitted = order <= budget
        value = survival[row, position]
        axes.add_patch(
            Rectangle(
                (position + 0.05, row + 0.06),
                0.9,
                0.88,
                facecolor=colormaps["Blues"](0.08 + 0.8 * value),
                edgecolor="#c44e00" if is_admitted else "#cccccc",
                linewidth=2.5 if is_admitted else 0.8,
            )
        )
        ink = "white" if value > 0.6 else "#222222"
        weight = "bold" if is_admitted else "normal"
        at = position + 0.5
        axes.text(
            at, row + 0.42, f"{value:.2f}", ha="center", va="center", color=ink, weight=weight
        )
        axes.text(at, row + 0.74, f"#{order}", ha="center", va="center", color=ink, size=8)
    for row, admitted in enumerate(verify_lens):
        axes.text(draft_len + 0.15, row + 0.5, f"verify {admitted}", va="center", weight="bold")
    axes.set(xlim=(0, draft_len + 1.1), ylim=(num_requests, 0), xlabel="draft position")
    axes.set_xticks(np.arange(draft_len) + 0.5, [str(i + 1) for i in range(draft_len)])
    axes.set_yticks(np.arange(num_requests) + 0.5, LABELS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{confidences.size} drafted slots, budget {budget}: the highest survivals win, "
        f"over all requests\n(in a slot: probability that it and all before it are accepted; "
        f"#: order of admission)",
        fontsize=10,
    )
    return figure


def main() -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(CONFIDENCES, BUDGET).savefig(PICTURE, dpi=110)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
