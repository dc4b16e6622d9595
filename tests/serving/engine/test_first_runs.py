"""Starting runs every program once, so that no client waits for a first run, and leaves no trace in the slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.packing import PackedPlan, PackedRows
from dspark_jax.decode.rings import Rings
from dspark_jax.decode.state import DecodeState, TokenCounts
from dspark_jax.decode.step import ModelParams
from dspark_jax.model.cache import PageGeometry
from dspark_jax.serving.executor import Executor
from tests.checkpoint.tiny import tiny_config

CFG = tiny_config()
assert CFG.draft is not None


class Programs:
    """In place of the compiled ones: they note which of them ran, and move every position."""

    def __init__(self, row_buckets: tuple[int, ...], efforts: tuple[Effort, ...]) -> None:
        self.row_buckets = row_buckets
        self.efforts = efforts
        self.draft_len = CFG.draft.block_size if CFG.draft and row_buckets else 0
        self.num_snapshots = 2
        self.ran: list[tuple[str, int, Effort]] = []
        self.copied: list[str] = []

    def verify(
        self, leaves: Any, state: DecodeState, plan: PackedPlan, effort: Effort
    ) -> tuple[DecodeState, Any]:
        self._note("verify", len(plan.prompt_ids), effort, plan.rows)
        ints = jnp.zeros((len(plan.rows.ints), self.draft_len + 4), jnp.int32)
        outputs = type("Outputs", (), {"ints": ints, "logprobs": ints, "prompt_logprobs": ints})
        return state.replace(positions=state.positions + 1), outputs

    def draft(
        self, leaves: Any, state: DecodeState, rows: PackedRows, effort: Effort
    ) -> tuple[DecodeState, Any]:
        self._note("draft", len(rows.ints), effort, rows)
        return state.replace(anchors=state.anchors + 1), jnp.zeros((len(rows.ints), self.draft_len))

    def save(self, snapshots: Rings, rings: Rings, *, slot: int, place: int) -> Rings:
        self.copied.append("save")
        return snapshots

    def restore(self, rings: Rings, snapshots: Rings, *, slot: int, place: int) -> Rings:
        self.copied.append("restore")
        return rings

    def set_counts(
        self, counts: TokenCounts, slot: int, output: np.ndarray, prompt: np.ndarray
    ) -> TokenCounts:
        self.copied.append("counts")
        return counts

    def _note(self, half: str, size: int, effort: Effort, rows: PackedRows) -> None:
        assert 0 < np.count_nonzero(np.asarray(rows.ints)[:, 0] >= 0) <= size
        # Where efforts are not told apart, whatever is asked for runs the one program.
        self.ran.append((half, size, max(effort, self.efforts[0])))

    def rows(self, bucket: int) -> int:
        return min(bucket, 4)

    def compile(self, params: Any, state: Any, *, progress: bool) -> None:
        assert not self.ran


@pytest.mark.parametrize("efforts", [(Effort.AS_NEEDED,), (Effort.PLAIN, Effort.FULL)], ids=len)
@pytest.mark.parametrize("row_buckets", [(), (1, 2)])
def test_every_program_runs_once_at_start(
    row_buckets: tuple[int, ...], efforts: tuple[Effort, ...]
) -> None:
    buckets = (1, 4, 32)
    programs: Any = Programs(row_buckets, efforts)
    nothing: Any = None
    cfg = CFG if row_buckets else dataclasses.replace(CFG, draft=None)
    executor = Executor(
        cfg,
        ModelParams(target=nothing, draft=None),
        num_slots=4,
        geometry=PageGeometry(256, 4, 1),
        max_model_len=64,
        executables=programs,
        buckets=buckets,
        cache_dtype=jnp.float32,
        profile=None,
    )
    executor.warm_up()
    sizes = [("verify", b) for b in buckets] + [("draft", r) for r in row_buckets]
    expected = [(*size, effort) for size in sizes for effort in efforts]
    assert sorted(programs.ran) == sorted(expected)
    assert programs.copied == ["save", "restore", "counts"]
    for left, empty in zip(
        jax.tree.leaves(executor.state), jax.tree.leaves(executor.fresh_state()), strict=True
    ):
        np.testing.assert_array_equal(left, empty)
