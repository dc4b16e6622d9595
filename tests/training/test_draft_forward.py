"""The drafter that is trained is the drafter that decodes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.draft.backbone import context_rows, run_block, write_context
from dspark_jax.draft.heads import transition_logits
from dspark_jax.draft.params import draft_specs
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model.params import param_specs
from dspark_jax.model.transformer import logits
from dspark_jax.training import draft_forward
from dspark_jax.training.draft_step import block_losses
from dspark_jax.training.generate import Features, Text
from tests.parity.compare import Tolerance, assert_close
from tests.training.tiny import TINY, perturbed

EXACT = Tolerance(2e-5, 2e-5, 1e-9)
LENGTH, WINDOW = 30, TINY.sliding_window
# Two stages, and few iterations where they only cost time.
BRIEF = dataclasses.replace(TINY, hc_sinkhorn_iters=4)


def test_equals_inference_at_short_and_full_windows():
    draft = perturbed(draft_specs(TINY), seed=1)
    target = perturbed(param_specs(TINY), seed=2)
    draw = np.random.default_rng(0)
    taps = jnp.asarray(draw.standard_normal((LENGTH, 2, 3, TINY.hidden_size)), jnp.float32)
    tokens = jnp.asarray(draw.integers(0, TINY.vocab_size, (2, LENGTH)), jnp.int32)
    # Nothing before it, a part of the window, exactly the window, and places where the ring has wrapped.
    at = jnp.array([[0, 3, WINDOW, 20], [1, 7, WINDOW + 1, LENGTH - 1]])
    flat = at.reshape(-1)
    owner = jnp.repeat(jnp.arange(2), at.shape[1])
    anchors = tokens[owner, flat]

    @jax.jit
    def trained(draft, target):
        rows = draft_forward.sequence_rows(draft, BRIEF, taps)
        window, visible = draft_forward.gather_window(rows, at, WINDOW)
        states, loads = draft_forward.run_blocks(
            draft,
            target.embed,
            BRIEF,
            window,
            visible,
            anchors=anchors,
            positions=flat,
            fused=False,
        )
        return states, draft_forward.base_logits(draft, target.head, BRIEF, states), loads

    @jax.jit
    def decoded(draft, target):
        # Every block has a slot of its own with the context of its sequence up to its anchor.
        positions = jnp.arange(LENGTH)

        def write(ring, slot):
            n = flat[slot]
            return write_context(
                ring,
                context_rows(draft, BRIEF, taps[:, owner[slot]], positions, dispatch=Dispatch()),
                slots=jnp.full(LENGTH, slot),
                positions=positions,
                kept=positions < n,
                behind=jnp.maximum(n - 1 - positions, 0),
            ), None

        ring = jnp.zeros((len(draft.stages.w_kv), len(flat), WINDOW, BRIEF.head_dim))
        states = run_block(
            draft,
            target,
            BRIEF,
            jax.lax.scan(write, ring, jnp.arange(len(flat)))[0],
            anchors=anchors,
            positions=flat,
            slots=jnp.arange(len(flat)),
            is_row=jnp.ones(len(flat), bool),
            dispatch=Dispatch(),
        )
        return states, logits(target, rms_norm(states, draft.g_norm, BRIEF.rms_norm_eps))

    states, predicted, loads = trained(draft, target)
    expected_states, expected = decoded(draft, target)
    assert_close(states, expected_states, EXACT)
    assert_close(predicted, expected, EXACT)
    np.testing.assert_allclose(loads.sum(-1), 1, rtol=1e-6)


def test_losses_of_a_later_part_of_a_text_are_those_of_the_text():
    """Only differences of positions count, so a part may begin to count at zero: `Text` relies on it."""
    draft = perturbed(draft_specs(BRIEF), seed=1)
    target = perturbed(param_specs(BRIEF), seed=2)
    draw = np.random.default_rng(0)
    taps = draw.standard_normal((LENGTH - 1, 2, 3, BRIEF.hidden_size)).astype(np.float32)
    hidden = draw.standard_normal((LENGTH - 1, 2, BRIEF.hidden_size)).astype(np.float32)
    tokens = draw.integers(0, BRIEF.vocab_size, (2, LENGTH)).astype(np.int32)

    @jax.jit
    def losses(text, at):
        total, _ = block_losses(
            draft, target.embed, target.head, BRIEF, text, at, dtype=jnp.float32
        )
        return total

    whole = Text(tokens, np.full(2, 20), Features(taps, hidden))
    part = Text(tokens[:, 9:], np.full(2, 11), Features(taps[9:], hidden[9:]))
    at = np.array([[17, 20], [21, 25]])
    assert at.min() - 9 >= WINDOW
    got, expected = losses(part, at - 9), losses(whole, at)
    jax.tree.map(lambda x, y: assert_close(x, y, EXACT), got, expected)


def test_transition_is_that_of_the_head():
    draft = perturbed(draft_specs(TINY), seed=1)
    previous = jnp.array([[3, 60], [0, 17]])
    ours = draft_forward.transition(draft, previous, jnp.float32)
    assert_close(ours, transition_logits(draft, previous), EXACT)


def test_gathered_rows_end_right_before_the_anchor():
    rows = jnp.arange(10.0)[None, :, None, None] * jnp.array([1.0, 100.0])[:, None]
    window, visible = draft_forward.gather_window(rows, jnp.array([[0, 2], [4, 9]]), 3)
    assert window.shape == (1, 4, 3, 1)
    np.testing.assert_array_equal(visible.sum(-1), [0, 2, 3, 3])
    newest_last = np.asarray(jnp.where(visible, window[0, ..., 0], -1))
    np.testing.assert_array_equal(
        newest_last, [[-1, -1, -1], [-1, 0, 1], [100, 200, 300], [600, 700, 800]]
    )


def test_gradient_reaches_everything_but_the_calibration():
    draft = perturbed(draft_specs(BRIEF), seed=1)
    target = perturbed(param_specs(BRIEF), seed=2)
    draw = np.random.default_rng(0)
    taps = jnp.asarray(draw.standard_normal((16, 1, 3, BRIEF.hidden_size)), jnp.float32)
    at = jnp.array([[4, 9]])

    def loss(params):
        rows = draft_forward.sequence_rows(params, BRIEF, taps)
        window, visible = draft_forward.gather_window(rows, at, WINDOW)
        states, _ = draft_forward.run_blocks(
            params,
            target.embed,
            BRIEF,
            window,
            visible,
            anchors=jnp.array([5, 6]),
            positions=at[0],
            fused=False,
        )
        bias = draft_forward.transition(params, jnp.array([5, 6]), jnp.float32)
        base = draft_forward.base_logits(params, target.head, BRIEF, states)
        return jnp.sum(jnp.sin(base + bias[:, None]))

    grads = jax.jit(jax.grad(loss))(draft)
    untouched = {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not np.any(leaf)
    }
    assert untouched == {
        ".calibration_scale",
        ".calibration_offset",
        ".w_confidence",
        ".stages.b_router",
    }
