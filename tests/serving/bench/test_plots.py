"""The pictures: every point drawn where its numbers say, also when numbers are missing."""

import matplotlib.image
import pytest
from matplotlib.axes import Axes

from dspark_jax.serving.bench.plots import draw_pareto, draw_speculation
from dspark_jax.serving.bench.report import interactivity, sweep_table


def _result(concurrency: int, rate: float, tpot_ms: float | None, **extra: float) -> dict:
    return {
        "max_concurrency": concurrency, "output_throughput": rate, "median_tpot_ms": tpot_ms,
        "failed": 0, **extra,
    }  # fmt: skip


def _speculating(concurrency: int, rate: float, tpot_ms: float | None, verify_len: float) -> dict:
    return _result(
        concurrency, rate, tpot_ms, spec_decode_num_drafts=9, dspark_verify_len=verify_len,
        dspark_verification_budget=verify_len * concurrency,
        spec_decode_acceptance_length=1 + verify_len / 2,
    )  # fmt: skip


SUMMARIES = {
    ("adaptive", 8): _speculating(8, 300.0, 20.0, 2.0),
    ("adaptive", 1): _speculating(1, 200.0, 5.0, 6.0),
    ("adaptive", 64): _speculating(64, 310.0, None, 0.0),
    ("fixed-3", 1): _speculating(1, 150.0, 8.0, 3.0),
    ("none", 8): _result(8, 200.0, 40.0, dspark_verification_budget=0.0),
    ("none", 1): _result(1, 100.0, 10.0, dspark_verification_budget=0.0),
}


@pytest.fixture
def lines(monkeypatch) -> list[tuple[str, list, list]]:
    """(label, x, y) of every line that is drawn."""
    drawn = []
    plot = Axes.plot

    def record(axes, x, y, **style):
        drawn.append((style["label"], list(x), list(y)))
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", record)
    return drawn


def test_pareto_goes_through_the_concurrencies_in_order(lines, tmp_path):
    draw_pareto(SUMMARIES, tmp_path / "p.png")
    assert lines == [
        ("none", [100.0, 25.0], [100.0, 200.0]),
        ("fixed-3", [125.0], [150.0]),
        ("adaptive", [200.0, 50.0], [200.0, 300.0]),
    ]
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0


def test_speculation_shows_only_what_speculates(lines, tmp_path):
    draw_speculation(SUMMARIES, tmp_path / "s.png")
    assert lines == [
        ("fixed-3", [1], [3.0]),
        ("adaptive", [1, 8, 64], [6.0, 16.0, 0.0]),
        ("fixed-3", [1], [3.0]),
        ("adaptive", [1, 8, 64], [6.0, 2.0, 0.0]),
        ("fixed-3", [1], [2.5]),
        ("adaptive", [1, 8, 64], [4.0, 2.0, 1.0]),
    ]
    assert matplotlib.image.imread(tmp_path / "s.png").std() > 0


def test_pictures_without_any_point(lines, tmp_path):
    draw_pareto({("none", 1): _result(1, 0.0, None)}, tmp_path / "p.png")
    draw_speculation({("none", 1): _result(1, 0.0, None)}, tmp_path / "s.png")
    assert lines == []
    assert (tmp_path / "p.png").exists()
    assert (tmp_path / "s.png").exists()


def test_table_orders_arms_and_compares_with_none():
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in sweep_table(SUMMARIES).splitlines()
    ]
    column = {title: i for i, title in enumerate(rows[0])}
    picked = ("arm", "concurrency", "tok/s per user", "accepted length", "vs none")
    assert [[row[column[name]] for name in picked] for row in rows[2:]] == [
        ["none", "1", "100.0", "-", "+0.0 %"],
        ["fixed-3", "1", "125.0", "2.50", "+50.0 %"],
        ["adaptive", "1", "200.0", "4.00", "+100.0 %"],
        ["none", "8", "25.0", "-", "+0.0 %"],
        ["adaptive", "8", "50.0", "2.00", "+50.0 %"],
        ["adaptive", "64", "-", "1.00", "-"],
    ]


def test_interactivity_needs_a_time_per_token():
    assert interactivity({"median_tpot_ms": 4.0}) == 250.0
    assert interactivity({"median_tpot_ms": None}) is None
    assert interactivity({}) is None
