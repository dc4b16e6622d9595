"""A server of random weights is laid out, and compiled, before the weights exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.rows import Fp8Rows, RoundedRows, RowFormat
from dspark_jax.serving import executor as executor_module
from dspark_jax.serving.config import parse_flags
from dspark_jax.serving.executables import Executables
from dspark_jax.serving.executor import Executor
from dspark_jax.serving.setup import Setup

TINY = Path(__file__).parents[2] / "benchmarks" / "models" / "tiny"


@pytest.fixture
def config(tmp_path: Path):
    return parse_flags(
        [
            "--model", str(TINY), "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "4",
            "--max-num-batched-tokens", "32", "--max-model-len", "256", "--compilation-cache-dir", str(tmp_path),
            "--hf-overrides", '{"num_hidden_layers": 3, "dspark_target_layer_ids": [0, 1, 2]}',
            "--speculative-config",
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.8, 0.7, 0.5, 0.1]}',
            "--benchmark-synthetic-acceptance", '{"miscalibration": 2}',
        ]
    )  # fmt: skip


def described(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def test_programs_are_compiled_for_what_the_executor_then_holds(config, monkeypatch):
    events: list[str] = []
    seen: dict[str, Any] = {}
    make = executor_module.dummy_params

    def compile(self: Executables, params: Any, state: Any, **options: Any) -> None:
        events.append("compile")
        seen.update(params=params, state=state)

    def weights(*args: Any, **options: Any) -> Any:
        events.append("weights")
        return make(*args, **options)

    monkeypatch.setattr(Executables, "compile", compile)
    monkeypatch.setattr(executor_module, "dummy_params", weights)
    executor = Executor.from_config(config)
    assert events == ["compile", "weights"]
    assert executor.draft_len == 5
    assert executor.model_config.num_hidden_layers == 3
    assert described(seen["params"]) == described(executor._params)
    assert described(seen["state"]) == described(executor.state)
    profile = np.array([0.9, 0.8, 0.7, 0.5, 0.1, 0.2, 0.2, 2, 1], np.float32)
    np.testing.assert_array_equal(executor.state.synthetic, profile)
    # Measuring and switching policies begin with a fresh state, which has the profile too.
    np.testing.assert_array_equal(executor.fresh_state().synthetic, profile)


@pytest.mark.parametrize(
    ("flags", "dtype", "row_format"),
    [
        (("float32", "auto"), jnp.float32, RowFormat.PLAIN),
        (("float32", "fp8"), jnp.float32, RowFormat.FP8),
        (("float32", "bfloat16"), jnp.bfloat16, RowFormat.PLAIN),
        (("bfloat16", "auto"), jnp.bfloat16, RowFormat.ROUNDED),
        (("bfloat16", "fp8"), jnp.bfloat16, RowFormat.FP8),
        (("bfloat16", "bfloat16"), jnp.bfloat16, RowFormat.PLAIN),
        (("bfloat16", "float32"), jnp.float32, RowFormat.PLAIN),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_cache_rows_follow_the_flag_and_the_arithmetic(config, flags, dtype, row_format):
    chosen = dataclasses.replace(config, dtype=flags[0], kv_cache_dtype=flags[1])
    setup = Setup.from_config(chosen)
    assert (setup.cache_dtype, setup.row_format) == (dtype, row_format)
    state = setup.abstract_state(setup.lay_out(setup.abstract_params()))
    assert state.draft_window is not None
    assert state.draft_window.dtype == dtype
    kind = {
        RowFormat.PLAIN: jax.ShapeDtypeStruct,
        RowFormat.ROUNDED: RoundedRows,
        RowFormat.FP8: Fp8Rows,
    }
    for rows in (state.cache.window, state.cache.csa_entries):
        assert isinstance(rows, kind[row_format])


def test_without_synthetic_acceptance_the_state_has_no_profile(config):
    plain = parse_flags(["--model", str(TINY), "--load-format", "dummy", "--max-model-len", "256"])
    setup = Setup.from_config(plain)
    assert setup.draft_len == 0
    state = setup.abstract_state(setup.lay_out(setup.abstract_params()))
    assert state.synthetic is None
    assert state.proposals is None
    assert Setup.from_config(config).draft_len == 5
