"""Targets of the kernels on made-up results."""

from __future__ import annotations

from benchmarks.kernel_targets import (
    COPY,
    TARGETS,
    Target,
    share_of,
    target_rows,
    times,
    without,
)
from benchmarks.report import render

DATA = {
    "device": "a GPU",
    "jax": "0.11.2",
    "bytes_per_s": 4e12,
    "flops": 8e14,
    "results": [
        {
            "kernel": "expert_mlp",
            "case": "fp4 64 tokens, 188 experts",
            "ms": 2.0,
            "bytes_per_s": 2e12,
            "flops": 4e14,
            "peers_ms": {"peer": 3.0},
        },
        {
            "kernel": "expert_mlp",
            "case": "fp4 128 tokens, 230 experts",
            "ms": 4.0,
            "bytes_per_s": 1e12,
            "flops": 4e14,
            "peers_ms": {},
        },
        {
            "kernel": "select",
            "case": "512 of 2048x2048",
            "ms": 1.0,
            "bytes_per_s": 1e12,
            "flops": 0.0,
            "peers_ms": {},
        },
        {"kernel": "expert_mlp", "case": "fp8 64 tokens, 188 experts", "failure": "error"},
    ],
}


def row(case, figure, threshold, **kwargs):
    """The verdict and the figure of one target of expert_mlp."""
    [only] = target_rows(DATA, [Target("expert_mlp", case, figure, threshold, **kwargs)])
    return only["verdict"], only["figure"]


def test_a_figure_is_compared_with_its_threshold():
    case = "fp4 64 tokens"
    assert row(case, COPY, 0.5) == ("met", 0.5)
    assert row(case, COPY, 0.6) == ("not met", 0.5)
    assert row(case, times("peer"), 1.0) == ("met", 1.5)
    assert row("fp4 128 tokens", times("peer", at=case), 1.0) == ("not met", 0.75)
    select = "select", "512 of 2048x2048"
    assert row(case, share_of(*select), 0.05, is_limit=True) == ("not met", 2.0)
    assert row(case, share_of(*select), 2.5, is_limit=True) == ("met", 2.0)
    # Half of the time is the other case's, so the rest computes at twice the rate.
    assert row(case, without(*select), 1.0) == ("met", 1.0)


def test_what_was_not_measured_is_said():
    assert row("fp4 6 tokens", COPY, 0.5) == ("not run", None)
    assert row("fp8 64 tokens", COPY, 0.5) == ("not run", None)
    nothing = "nothing to compare with", None
    assert row("fp4 64 tokens", times("another peer"), 1.0) == nothing
    assert row("fp4 64 tokens", share_of("sparse_mla", "flash decode_64"), 1.0) == nothing


def test_every_target_of_a_measured_kernel_has_a_row_of_its_own():
    rows = target_rows(DATA)
    kernels = {result["kernel"] for result in DATA["results"]}
    assert len(rows) == sum(target.kernel in kernels for target in TARGETS) < len(TARGETS)
    assert len({(r["kernel"], r["case"], r["what"]) for r in rows}) == len(rows)
    assert {r["verdict"] for r in rows} == {"not met", "not run", "nothing to compare with"}


def test_the_page_shows_ratios_and_targets():
    page = render(DATA | {"targets": target_rows(DATA)})
    assert "peer 3 (1.50x)" in page
    assert "fp8 64 tokens, 188 experts" not in page
    assert "nothing to compare with" in page
    assert "verdict" not in render(DATA)
