"""A drafter learns what it can know, and needs the transition for what it cannot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.model.params import param_specs
from dspark_jax.training.draft_step import TrainingFlags, choose_anchors
from dspark_jax.training.generate import Features, Text
from dspark_jax.training.train_draft import Trainer
from tests.training.tiny import SHALLOW, perturbed

ROWS, LENGTH = 256, 24
FLAGS = TrainingFlags(
    rows=16, anchors=4, peak=3e-2, warmup=10, from_target=False, compute_dtype="float32"
)


def markov_text(target, distinct: int, seed: int) -> Text:
    """Sequences of a chain whose next token depends on the last one alone, with the features of a perfect target.

    The logits behind a token have the Markov tables' rank, so the transition can express the chain exactly.
    `distinct` sequences are repeated to ROWS.
    """
    draw = np.random.default_rng(seed)
    cfg = SHALLOW
    mix = draw.standard_normal((cfg.draft.markov_rank, cfg.hidden_size))
    hidden = draw.standard_normal((cfg.vocab_size, cfg.draft.markov_rank)) @ mix
    hidden = hidden.astype(np.float32)
    logits = hidden @ np.asarray(target.head).T
    # Peaked, so that two steps ahead little is certain and one step ahead much is.
    hidden *= 3.0 / logits.std()
    logits *= 3.0 / logits.std()
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    tokens[:, 0] = draw.integers(0, cfg.vocab_size, ROWS)
    for place in range(1, LENGTH):
        noise = draw.gumbel(size=(ROWS, cfg.vocab_size))
        tokens[:, place] = np.argmax(logits[tokens[:, place - 1]] + noise, axis=1)
    tokens = tokens[np.arange(ROWS) % distinct]
    states = jnp.asarray(hidden[tokens[:, :-1]].swapaxes(0, 1))
    taps = jnp.tile(states[:, :, None], (1, 1, len(cfg.draft.target_layer_ids), 1))
    return Text(jnp.asarray(tokens), jnp.full(ROWS, 2), Features(taps, states))


def trainer(distinct: int) -> Trainer:
    target = perturbed(param_specs(SHALLOW), seed=7)
    return Trainer(SHALLOW, target, [markov_text(target, distinct, seed=5)], FLAGS)


def silent(line: dict) -> None:
    """A log for nobody."""


@pytest.mark.parametrize(
    ("steps", "good"),
    [(100, 0.8), pytest.param(800, 0.93, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_transition_is_needed_behind_the_first_position(steps, good):
    """A chain is certain one step ahead and vague behind: only the transition sees the token before."""
    runs = trainer(distinct=ROWS)
    acceptance = {}
    for markov in (True, False):
        params, last = runs.train(silent, steps=steps, markov=markov)
        assert bool(np.any(params.markov_w2)) is markov
        assert last["steps"] == steps
        acceptance[markov] = np.array(last["acceptance"])
    assert (acceptance[True] > good).all(), acceptance
    assert acceptance[False][0] > 0.8
    assert (acceptance[False][1:] < 0.55).all(), acceptance


def test_training_goes_on_from_given_parameters():
    runs = trainer(distinct=ROWS)
    fresh, _ = runs.train(silent, steps=60)
    _, again = runs.train(silent, steps=FLAGS.warmup)
    _, further = runs.train(silent, steps=FLAGS.warmup, initial=fresh)
    assert further["tv"] < 0.7 * again["tv"], (further, again)


@pytest.mark.parametrize(
    ("steps", "least"),
    [(120, 0.3), pytest.param(1000, 0.08, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_few_sequences_are_learnt_by_heart(steps, least):
    """Total variation, of at most 2, goes to zero where there is nothing left to be unsure of."""
    _, last = trainer(distinct=4).train(silent, steps=steps)
    assert last["tv"] < least


def test_anchors_lie_in_equal_parts_of_the_answer():
    first = jnp.array([3, 10])
    at = np.asarray(choose_anchors(jax.random.key(0), first, 18, 4))
    for row, start in zip(at, (3, 10)):
        edges = start + (19 - start) / 4 * np.arange(5)
        assert (row >= np.floor(edges[:-1])).all()
        assert (row < edges[1:]).all()
    assert at.max() <= 18


def test_time_needs_enough_warm_up_steps():
    untouched = Trainer.__new__(Trainer)
    untouched._flags = FLAGS
    with pytest.raises(ValueError, match="at least 50 warm-up steps, not 10"):
        untouched.train(silent, seconds=1.0)


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="no text"):
        Trainer(SHALLOW, perturbed(param_specs(SHALLOW), seed=7), [], FLAGS)
