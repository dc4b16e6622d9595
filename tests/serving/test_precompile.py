"""Shares of the programs, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_jax.serving import executables
from dspark_jax.serving.precompile import main

TINY = Path(__file__).parents[2] / "benchmarks" / "models" / "tiny"
FLAGS = [
    "--model", str(TINY), "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "32", "--max-model-len", "256", "--speculative-config", "{}",
    "--compilation-config", '{"cudagraph_capture_sizes": [4, 8, 32]}',
]  # fmt: skip


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs asked for, none of which is compiled."""
    keys: list[str] = []

    def build(self: Any, name: str, *rest: Any) -> object:
        keys.append(name)
        return object()

    monkeypatch.setattr(executables.Executables, "_load_or_compile", build)
    return keys


def test_shares_are_disjoint_and_complete(built, tmp_path):
    flags = [*FLAGS, "--compilation-cache-dir", str(tmp_path)]
    assert main([*flags, "--share", "0/1"]) == 0
    everything = sorted(built)
    assert len(everything) == 3 + 1 + 3  # buckets 4, 8, 32; drafting for 4 requests; resumption
    parts = []
    for share in ("0/3", "1/3", "2/3"):
        built.clear()
        assert main(["--share", share, *flags]) == 0
        assert built
        parts += built
    assert sorted(parts) == everything


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (FLAGS, "--share I/N is missing"),
        ([*FLAGS, "--share", "2/2"], "I below N"),
        (["--share", "0/1"], "only programs of --load-format dummy"),
    ],
)
def test_refusals(flags, message, built, capsys):
    assert main(flags) == 2
    assert message in capsys.readouterr().err
    assert not built
