"""The differentiable target equals the reference, and its pieces equal the inference model's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.kernels.hyper.reference import sinkhorn
from dspark_jax.model.params import param_specs
from dspark_jax.training import forward as fwd
from dspark_jax.training.attention import kth_largest
from dspark_jax.training.layers import highest
from dspark_jax.training.sinkhorn import fused_sinkhorn
from tests.parity.compare import FLOAT32_MODEL, FLOAT32_OP, Tolerance, assert_close
from tests.training.tiny import CSA, SHALLOW, SLIDING, TINY, perturbed
from torch_ref.checkpoint import load_checkpoint
from torch_ref.model import forward_with_states

# Streams grow with depth before the last norm brings them back to one.
_STREAMS = Tolerance(1e-4, 1e-4, 1e-9)


@pytest.fixture(scope="module")
def params():
    return perturbed(param_specs(TINY), seed=3)


def test_logits_and_taps_equal_the_reference(params, tmp_path):
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 48))
    export_checkpoint(tmp_path, TINY, params, None, quantize=False)
    cfg, weights = load_checkpoint(tmp_path)
    expected, states = forward_with_states(weights, cfg, torch.from_numpy(ids))

    taps = (1, 4, 5)
    out = jax.jit(lambda p, ids: fwd.forward(p, TINY, ids, tap_layers=taps))(params, ids)

    assert_close(fwd.logits(params, out.hidden), expected, FLOAT32_MODEL, "logits")
    for j, layer in enumerate(taps):
        assert_close(out.taps[:, :, j], states[layer + 1].mean(2), _STREAMS, f"tap {layer}")


def test_padding_on_the_right_changes_nothing(params):
    ids = np.random.default_rng(1).integers(0, TINY.vocab_size, (1, 48))
    changed = ids.copy()
    changed[:, 30:] = 5
    run = jax.jit(lambda ids: fwd.forward(params, TINY, ids).hidden)
    assert_close(run(ids)[:, :30], run(changed)[:, :30], FLOAT32_OP)


def test_selection_changes_the_result_and_trains_only_the_indexer():
    cfg = dataclasses.replace(
        SHALLOW, num_hidden_layers=2, attention_kinds=(SLIDING, CSA), draft=None
    )
    params = perturbed(param_specs(cfg), seed=4)
    ids = np.random.default_rng(2).integers(0, cfg.vocab_size, (2, 48))

    def divergence(p, select):
        return fwd.forward(p, cfg, ids, select=select).index_kl.sum()

    hidden = jax.jit(lambda select: fwd.forward(params, cfg, ids, select=select).hidden)
    assert float(jnp.abs(hidden(False) - hidden(True)).max()) > 1e-2
    gradient = jax.jit(jax.grad(divergence, allow_int=True))
    for select in (False, True):
        grads = gradient(params, select)
        indexer = jax.tree.map(lambda g: float(jnp.abs(g).max()), grads.indexer)
        assert min(jax.tree.leaves(indexer)) > 0
        others = grads.replace(indexer=None, tid2eid=None)
        assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(others))


def test_fused_sinkhorn_and_its_gradient_equal_the_plain_one():
    keys = jax.random.split(jax.random.key(0))
    logits, cotangent = (jax.random.normal(k, (3, 50, 4, 4)) * 2 for k in keys)
    plain, plain_vjp = jax.vjp(lambda x: sinkhorn(x, 20, 1e-6), logits)
    fused, fused_vjp = jax.vjp(lambda x: fused_sinkhorn(x, 20, 1e-6, True), logits)
    assert_close(fused, plain, FLOAT32_OP)
    assert_close(fused_vjp(cotangent)[0], plain_vjp(cotangent)[0], FLOAT32_OP)


def test_kth_largest_is_exact():
    scores = jax.random.normal(jax.random.key(4), (5, 40)).at[0, 3:].set(-1e30)
    expected = jnp.sort(scores, axis=-1)[:, -7]
    np.testing.assert_array_equal(kth_largest(scores, 7), expected)


def test_top_breaks_ties_as_top_k_does():
    scores = jnp.array([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 3.0]])
    picked = jax.lax.top_k(scores, 2)[1]
    expected = jax.nn.one_hot(picked, 4, dtype=bool).any(axis=1)
    np.testing.assert_array_equal(highest(scores, 2), expected)
