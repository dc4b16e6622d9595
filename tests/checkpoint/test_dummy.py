"""Random weights look, to every reader, as if they came from a released checkpoint."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.dummy import abstract_params, dummy_params
from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.kernels.quantized import Fp4Weight, Fp8Weight, dequantize
from tests.checkpoint.tiny import random_trees, tiny_config


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("keep_quantized", [False, True])
def test_the_trees_are_those_of_a_checkpoint(tmp_path, expert_dtype, keep_quantized):
    cfg = tiny_config(expert_dtype=expert_dtype)
    export_checkpoint(tmp_path / "released", cfg, *random_trees(cfg))
    how = {"dtype": jnp.bfloat16, "keep_quantized": keep_quantized}
    _, *expected = load_checkpoint(tmp_path / "released", **how)
    dummy = list(dummy_params(cfg, **how))
    assert jax.tree.structure(dummy) == jax.tree.structure(expected)
    assert described(dummy) == described(expected)
    assert described(list(abstract_params(cfg, **how))) == described(expected)


def test_without_a_drafter():
    cfg = dataclasses.replace(tiny_config(), draft=None)
    target, draft = dummy_params(cfg)
    assert draft is None
    assert target.embed.shape == (96, 160)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_values_are_finite_and_products_have_unit_variance(expert_dtype):
    cfg = tiny_config(expert_dtype=expert_dtype)
    target, draft = dummy_params(cfg, keep_quantized=True, seed=3)
    assert draft is not None
    for weight in (
        target.blocks.w_gate_up,
        target.blocks.w_q_b,
        target.blocks.w_o_b,
        draft.w_main,
        target.blocks.w_router,
        target.csa.w_kv_gate,
    ):
        values = np.asarray(dequantize(weight), np.float64)
        assert np.isfinite(values).all()
        # Scales are powers of two: up to a factor of sqrt(2), and chance.
        lengths = np.sqrt((values**2).mean() * values.shape[-1])
        assert 0.6 < lengths < 1.65, (type(weight), lengths)
        assert abs(values.mean()) < 0.1 * values.std()
    assert isinstance(target.blocks.w_q_a, Fp8Weight)
    expected = Fp4Weight if expert_dtype == "fp4" else Fp8Weight
    assert isinstance(target.blocks.w_down, expected)
    np.testing.assert_array_equal(target.blocks.g_attn, 1)


def test_every_code_but_nan_occurs():
    target, _ = dummy_params(tiny_config(), keep_quantized=True)
    codes = np.asarray(target.blocks.w_q_b.weight).view(np.uint8)
    assert set(range(256)) - set(codes.reshape(-1).tolist()) == {0x7F, 0xFF}
    packed = np.asarray(target.blocks.w_gate_up.packed).view(np.uint8)
    assert len(np.unique(packed)) == 256
    # No two matrices of a stack, and no two stacks, are alike.
    flat = packed.reshape(packed.shape[0] * packed.shape[1], -1)
    assert len(np.unique(flat, axis=0)) == len(flat)


def test_tables_name_different_experts():
    cfg = tiny_config(n_routed_experts=6, num_experts_per_tok=4)
    table = np.asarray(dummy_params(cfg)[0].tid2eid)
    assert table.shape == (1, 96, 4)
    assert all(len(set(row)) == 4 for row in table[0].tolist())
    assert set(table.reshape(-1).tolist()) == set(range(6))


def test_values_hang_on_the_seed():
    cfg = tiny_config()
    first, again, other = (dummy_params(cfg, seed=seed)[0].embed for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_an_unknown_storage_is_refused():
    with pytest.raises(CheckpointError, match="expert_dtype 'int3' is unknown"):
        dummy_params(tiny_config(expert_dtype="int3"))
