"""The drafter of released checkpoints against the PyTorch reference, in float32."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.draft.drafters import SLOTS, WINDOW, Drafted, Drafters
from tests.parity.compare import FLOAT32_MODEL, FLOAT32_UNROLLED, assert_close
from tests.parity.target import Twins, make_twins
from tests.seeds import fresh_seed
from tests.torch_ref.configs import random_features, tiny_dspark_config
from torch_ref.draft import DSparkDrafter, draft_block
from torch_ref.draft import context_rows as context_rows_reference
from torch_ref.scope import Scope

LENGTHS = [(0, 1, 5, 7), (8, 9, 16, 30)]


@pytest.fixture(scope="module")
def twins() -> Twins:
    reference = tiny_dspark_config(
        compress_ratios=(0, 0, 0), sliding_window=WINDOW, dspark_target_layer_ids=(0, 1, 2)
    )
    return make_twins(reference, seed=4)


def features_of(twins: Twins, count: int, seed: int) -> torch.Tensor:
    return random_features(count, 3 * twins.cfg.hidden_size, seed)


def assert_same_proposal(
    twins: Twins, drafted: Drafted, slot: int, reference, anchor: int, tolerance=FLOAT32_MODEL
) -> None:
    """Hidden states, tokens, corrected logits and confidences of a slot are the reference's."""
    scope = Scope(twins.weights)
    context = reference.visible_context()
    hidden = draft_block(scope, twins.reference, context, anchor, reference.length)
    expected = reference.propose(anchor)
    proposal = drafted.proposal
    name = f"slot {slot} at {reference.length}"
    assert_close(drafted.hidden[slot], hidden, tolerance, f"hidden, {name}")
    assert_close(proposal.kept[slot], expected.logits, tolerance, f"logits, {name}")
    assert proposal.tokens[slot].tolist() == expected.tokens.tolist()
    assert_close(proposal.confidences[slot], expected.confidences, tolerance, name)
    logprobs = expected.logits.log_softmax(-1).gather(1, expected.tokens[:, None])[:, 0]
    assert_close(proposal.logprobs[slot], logprobs, tolerance, name)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_context_block_and_heads_equal_the_reference(twins, lengths):
    """From no context at all to a window that has slid far; what was never written is NaN."""
    drafters = Drafters(twins)
    anchors = [17, 5, 99, 64]
    scope = Scope(twins.weights)
    references = []
    for slot, length in enumerate(lengths):
        references.append(DSparkDrafter(twins.weights, twins.reference))
        if length == 0:
            continue
        features = features_of(twins, length, slot)
        rows = drafters.extend({slot: features}, {slot: length})
        references[slot].extend(features)
        places = torch.arange(length)
        expected = context_rows_reference(scope, twins.reference, features, places)
        assert_close(rows[:, :length], expected, FLOAT32_MODEL, f"context of slot {slot}")
    drafted = drafters.propose(anchors)
    for slot, reference in enumerate(references):
        assert_same_proposal(twins, drafted, slot, reference, anchors[slot])


def test_any_pattern_of_acceptance_equals_a_fresh_start(twins):
    """Rejected tokens bring features too; after each step the draft is that of a drafter that never saw them."""
    rng = np.random.default_rng(fresh_seed())
    drafters = Drafters(twins)
    committed = [torch.zeros(0, 3 * twins.cfg.hidden_size) for _ in range(SLOTS)]
    for step in range(8):
        features, accepted = {}, {}
        for slot in rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist():
            count = int(rng.integers(1, 7))
            features[slot] = features_of(twins, count, 100 * step + slot)
            accepted[slot] = int(rng.integers(0 if len(committed[slot]) else 1, count + 1))
            committed[slot] = torch.cat([committed[slot], features[slot][: accepted[slot]]])
        drafters.extend(features, accepted)
        anchors = rng.integers(0, 128, SLOTS).tolist()
        drafted = drafters.propose(anchors)
        for slot in range(SLOTS):
            reference = DSparkDrafter(twins.weights, twins.reference)
            reference.extend(committed[slot])
            # Inputs drawn anew: a few of them are far from the float64 result in both frameworks.
            assert_same_proposal(
                twins, drafted, slot, reference, anchors[slot], tolerance=FLOAT32_UNROLLED
            )


def test_no_context_row_at_the_anchor_and_none_beyond_the_window(twins):
    drafters = Drafters(twins)
    for slot, length in enumerate((1, 3, 7, 20)):
        drafters.extend({slot: features_of(twins, length, slot)}, {slot: length})
    before = drafters.propose([9] * SLOTS)
    untouched = jnp.isnan(drafters.ring).all(axis=(0, 3)).tolist()
    assert untouched[:3] == [[place >= length for place in range(WINDOW)] for length in (1, 3, 7)]
    # The place of position n is the only one to spare in a full ring: it holds n - W, which is visible.
    for slot, length in enumerate((1, 3, 7, 20)):
        for place in range(WINDOW):
            held = place < length or length >= WINDOW
            changed = drafters.ring.at[:, slot, place].add(0.5)
            moved = Drafters(twins)
            moved.ring, moved.lengths = changed, drafters.lengths
            after = moved.propose([9] * SLOTS)
            gap = jnp.abs(after.hidden - before.hidden).max(axis=(1, 2))
            assert (gap[slot] > 1e-3) == held
            assert jnp.delete(gap, slot).max() == 0


def test_the_block_is_rotated_from_the_anchors_position_on(twins):
    """One place off is no rounding: the comparison above would see it."""
    drafters = Drafters(twins)
    drafters.extend({2: features_of(twins, 12, 3)}, {2: 12})
    reference = DSparkDrafter(twins.weights, twins.reference)
    reference.extend(features_of(twins, 12, 3))
    scope, context = Scope(twins.weights), reference.visible_context()
    hidden = np.asarray(drafters.propose([40] * SLOTS).hidden[2])
    for shift in (-1, 1):
        wrong = draft_block(scope, twins.reference, context, 40, 12 + shift).numpy()
        assert np.abs(hidden - wrong).max() > 1e-3


def test_a_confidence_never_looks_at_its_own_token(twins):
    drafters = Drafters(twins)
    drafters.extend({0: features_of(twins, 6, 5)}, {0: 6})
    size = twins.cfg.draft.block_size
    forced = np.tile(np.arange(20, 20 + size), (SLOTS, 1))
    before = drafters.propose([9] * SLOTS, forced).proposal
    assert before.tokens.tolist() == forced.tolist()
    for k in range(size):
        changed = forced.copy()
        changed[:, k] += 50
        after = drafters.propose([9] * SLOTS, changed).proposal
        np.testing.assert_array_equal(after.confidences[:, : k + 1], before.confidences[:, : k + 1])
        np.testing.assert_array_equal(after.kept[:, : k + 1], before.kept[:, : k + 1])
        if k + 1 < size:
            # Its successor sees it; the Markov head has a memory of one.
            assert (after.confidences[0, k + 1] != before.confidences[0, k + 1]).all()
            assert (after.kept[0, k + 1] != before.kept[0, k + 1]).any()
            np.testing.assert_array_equal(after.kept[:, k + 2 :], before.kept[:, k + 2 :])


def test_calibration_scales_and_shifts_the_logit(twins):
    drafters = Drafters(twins)
    drafters.extend({0: features_of(twins, 6, 5)}, {0: 6})
    plain = np.asarray(drafters.propose([9] * SLOTS).proposal.confidences, np.float64)
    scale, offset = np.array([0.5, 1, 2, 1, 3]), np.array([0, 0.7, 0, -1.5, 0.2])
    params = twins.draft_params.replace(
        calibration_scale=jnp.asarray(scale, jnp.float32),
        calibration_offset=jnp.asarray(offset, jnp.float32),
    )
    drafters.twins = twins._replace(draft_params=params)
    calibrated = drafters.propose([9] * SLOTS).proposal.confidences
    z = np.log(plain / (1 - plain)) * scale + offset
    assert_close(calibrated, 1 / (1 + np.exp(-z)), FLOAT32_MODEL)
