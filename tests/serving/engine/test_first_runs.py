"""Starting runs every program once, so that no client waits for a first run, and leaves no trace in the slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.packing import PackedPlan, PackedRows
from dspark_jax.decode.step import ModelParams
from dspark_jax.model.cache import PageGeometry
from dspark_jax.serving.executor import Executor
from tests.checkpoint.tiny import tiny_config

CFG = tiny_config()
assert CFG.draft is not None


class Programs:
    """In place of the compiled ones: they note which of them ran, and move every position."""

    def __init__(self, buckets: tuple[int, ...], row_buckets: tuple[int, ...]) -> None:
        self.row_buckets = row_buckets
        self.draft_len = CFG.draft.block_size if CFG.draft and row_buckets else 0
        self.ran: list[tuple[str, int]] = []
        self.verify = {bucket: self._program("verify", bucket) for bucket in buckets}
        self.draft = {rows: self._program("draft", rows) for rows in row_buckets}

    def _program(self, half: str, size: int) -> Any:
        def run(params: Any, state: Any, *rest: Any) -> tuple[Any, Any]:
            packed: PackedPlan | PackedRows = rest[-1]
            rows = packed.rows if isinstance(packed, PackedPlan) else packed
            assert 0 < np.count_nonzero(np.asarray(rows.ints)[:, 0] >= 0) <= size
            self.ran.append((half, size))
            ints = jnp.zeros((len(rows.ints), self.draft_len + 4), jnp.int32)
            if half == "draft":
                return state.replace(lens=state.lens + 1), ints  # of proposals
            state = state.replace(positions=state.positions + 1)
            return state, type("Outputs", (), {"ints": ints, "logprobs": (), "prompt_logprobs": ()})

        return run

    def rows(self, bucket: int) -> int:
        return min(bucket, 4)

    def compile(self, params: Any, state: Any, *, progress: bool) -> None:
        assert not self.ran


@pytest.mark.parametrize("row_buckets", [(), (1, 2)])
def test_every_program_runs_once_at_start(row_buckets: tuple[int, ...]) -> None:
    buckets = (1, 4, 32)
    programs: Any = Programs(buckets, row_buckets)
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
    expected = [("verify", b) for b in buckets] + [("draft", r) for r in row_buckets]
    assert sorted(programs.ran) == sorted(expected)
    for left, empty in zip(
        jax.tree.leaves(executor.state), jax.tree.leaves(executor.fresh_state()), strict=True
    ):
        np.testing.assert_array_equal(left, empty)
