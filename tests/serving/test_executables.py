"""A step cut into programs by effort does what the whole step does, and is found again in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.dummy import dummy_params
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.packing import pack
from dspark_jax.decode.plan import RowPlan, StepPlan
from dspark_jax.decode.step import ModelParams
from dspark_jax.serving import executables
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.executables import Executables, step_leaves
from dspark_jax.serving.setup import Setup

TINY = Path(__file__).parents[2] / "benchmarks" / "models" / "tiny"
FLAGS = [
    "--model", str(TINY), "--load-format", "dummy", "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
    "--max-model-len", "128", "--compilation-config", '{"cudagraph_capture_sizes": [16]}',
]  # fmt: skip
# A layer of every kind and a drafter, or no drafter and none that compresses heavily.
DRAFTING = ["--hf-overrides", '{"num_hidden_layers": 4, "dspark_target_layer_ids": [1, 2, 3]}',
            "--speculative-config", "{}"]  # fmt: skip
DECODING = ["--hf-overrides", '{"num_hidden_layers": 3, "dspark_target_layer_ids": [0, 1, 2]}']
PARTS = (Effort.PLAIN, Effort.FULL)
PLAIN = {"temperature": 0.9}
ASKS_FOR_MORE = {"temperature": 0.9, "top_k": 5, "presence_penalty": 0.5, "wants_logprobs": True}


def programs(setup: Setup, efforts: tuple[Effort, ...]) -> Executables:
    """What `setup` would compile if it told these efforts apart."""
    made = setup.executables(setup.lay_out(setup.abstract_params()))
    made.efforts = efforts
    return made


def run(
    made: Executables, setup: Setup, params: ModelParams, sampling: dict[str, Any]
) -> tuple[list[np.ndarray], list[Effort]]:
    """Feed two prompts, then verify what is drafted for them; everything that comes back."""
    geometry = setup.lay_out(setup.abstract_params())
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), setup.abstract_state(geometry)
    )
    made.compile(params, state, progress=False)
    leaves, seen, efforts = step_leaves(params), [], []
    pages = np.arange(2 * geometry.max_pages, dtype=np.int32).reshape(2, -1)
    for step in range(4):
        rows = tuple(
            RowPlan(
                slot=slot,
                prompt_ids=np.arange(3 + slot, dtype=np.int32) + 5 if step == 0 else None,
                draft_cap=made.draft_len,
                limit=100,
                prompt_len=3 + slot,
                seed=slot,
                **(sampling if slot else PLAIN),
            )
            for slot in range(2)
        )
        budget = made.draft_len if step else 0
        plan = StepPlan(rows=rows, page_table=pages, budget=budget, bucket=16, drafts=True)
        packed = pack(plan, rows=made.rows(16))
        state, outputs = made.verify(leaves, state, packed, plan.effort)
        seen += [np.asarray(leaf) for leaf in jax.tree.leaves(outputs)]
        if made.draft_len:
            state, confidences = made.draft(leaves, state, packed.rows, plan.effort)
            seen.append(np.asarray(confidences))
        efforts.append(plan.effort)
    return seen, efforts


@pytest.mark.parametrize("model", [DRAFTING, DECODING], ids=["drafting", "decoding"])
def test_a_step_in_parts_does_what_the_whole_does(model: list[str], tmp_path, monkeypatch) -> None:
    flags = [*FLAGS, *model, "--compilation-cache-dir", str(tmp_path)]
    setup = Setup.from_config(parse_flags(flags))
    params = ModelParams(*dummy_params(setup.model_config, **setup.storage, seed=1, progress=False))
    whole, parts = programs(setup, (Effort.AS_NEEDED,)), programs(setup, PARTS)
    for sampling, effort in ((PLAIN, Effort.PLAIN), (ASKS_FOR_MORE, Effort.FULL)):
        expected, efforts = run(whole, setup, params, sampling)
        assert efforts == [effort] * 4
        actual, _ = run(parts, setup, params, sampling)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced although it is stored")

    for part in ("score", "settle", "draft_step"):
        monkeypatch.setattr(executables, part, refuse)
    again, _ = run(programs(setup, PARTS), setup, params, ASKS_FOR_MORE)
    for one, other in zip(again, actual, strict=True):
        np.testing.assert_array_equal(one, other)
