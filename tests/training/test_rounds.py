"""Rounds replayed on finished text have the law of rounds that are drafted and verified."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.sampling import SamplingRows
from dspark_jax.decode.verify import LogitRows, verify_standard
from dspark_jax.draft.heads import confidence_logits
from dspark_jax.draft.params import draft_specs
from dspark_jax.model.params import param_specs
from dspark_jax.training.draft_forward import (
    base_logits,
    gather_window,
    run_blocks,
    sequence_rows,
    transition,
)
from dspark_jax.training.forward import forward, logits
from dspark_jax.training.generate import Text, sample
from dspark_jax.training.rounds import collect, replay_rounds, text_ends
from tests.training.tiny import SHALLOW, perturbed

G = SHALLOW.draft.block_size
ENDLESS = dataclasses.replace(SHALLOW, eos_token_id=SHALLOW.vocab_size)
WINDOW = SHALLOW.sliding_window
DRAWS, ANCHOR, LENGTH = 1024, 10, 24
JUDGED = -(-(ANCHOR + G + 1) // WINDOW) * WINDOW


@pytest.fixture(scope="module")
def models():
    target = perturbed(param_specs(SHALLOW), seed=7)
    return target, perturbed(draft_specs(SHALLOW), seed=8)


@pytest.fixture(scope="module")
def continuations(models):
    """Many continuations of one text, whose anchor at position ANCHOR is given."""
    target, _ = models
    prompt = np.random.default_rng(0).integers(4, SHALLOW.vocab_size, LENGTH)
    prompts = jnp.asarray(np.tile(prompt, (DRAWS, 1)), jnp.int32)
    given = jnp.full(DRAWS, ANCHOR + 1)
    out = sample(target, SHALLOW, prompts, given, jax.random.key(1))
    return Text(out.tokens, jnp.full(DRAWS, ANCHOR), out.features)


def test_replay_has_the_law_of_verification(models, continuations):
    target, draft = models
    played = replay_rounds(
        draft,
        target.embed,
        target.head,
        ENDLESS,
        continuations,
        jnp.asarray(False),
        jax.random.key(2),
        rounds=1,
    )
    verified, z = _verified_rounds(models, continuations.tokens[0])
    replayed = np.asarray(played.accept_lens[0])
    expected = np.bincount(np.asarray(verified), minlength=G + 1) / DRAWS
    seen = np.bincount(replayed, minlength=G + 1) / DRAWS
    spread = np.sqrt(2 * np.maximum(expected, 0.01) / DRAWS)
    assert (np.abs(seen - expected) < 4.5 * spread).all(), (seen, expected)
    # Confidences look at all drafted tokens, the ones behind a rejection too.
    theirs, ours = np.asarray(z), np.asarray(played.confidence_logits[0])
    error = np.sqrt(2 / DRAWS) * theirs.std(axis=0) + 1e-3
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4.5 * error).all()
    assert (theirs.std(axis=0)[1:] > 0.01).all()


@jax.jit
def _verified_rounds(models, tokens):
    """Accepted lengths and confidence logits of proposals that the target really judged."""
    drafts, q, states = _proposals(*models, tokens)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(q), drafts[..., None], axis=-1)[..., 0]
    judged = _judged(models[0], tokens, drafts)
    verdict = verify_standard(
        judged.reshape(-1, SHALLOW.vocab_size),
        drafts,
        logprobs,
        lambda place: q[jnp.arange(DRAWS), place],
        LogitRows(
            base=jnp.arange(DRAWS) * (G + 1),
            verify_lens=jnp.full(DRAWS, G),
            positions=jnp.full(DRAWS, ANCHOR),
        ),
        _plain_sampling(DRAWS),
    )
    previous = jnp.concatenate([jnp.full((DRAWS, 1), tokens[ANCHOR]), drafts[:, :-1]], axis=1)
    states = jnp.broadcast_to(states, (DRAWS, *states.shape[1:]))
    return verdict.accept_lens, confidence_logits(models[1], states, previous)


def _proposals(target, draft, tokens):
    """Drafts [DRAWS, G] behind tokens[ANCHOR], logits of their distributions, and the block's states [1, G, M]."""
    taps = forward(
        target, SHALLOW, tokens[None, :LENGTH], tap_layers=SHALLOW.draft.target_layer_ids
    ).taps
    rows = sequence_rows(draft, SHALLOW, jnp.swapaxes(taps, 0, 1))
    at = jnp.full((1, 1), ANCHOR)
    window, visible = gather_window(rows, at, SHALLOW.sliding_window)
    states, _ = run_blocks(
        draft,
        target.embed,
        SHALLOW,
        window,
        visible,
        anchors=tokens[None, ANCHOR],
        positions=at[0],
        fused=False,
    )
    base = base_logits(draft, target.head, SHALLOW, states)[0]
    before = jnp.full(DRAWS, tokens[ANCHOR])
    drafted, shaped = [], []
    for k in range(G):
        corrected = base[k] + transition(draft, before, jnp.float32)
        shaped.append(corrected)
        before = jax.random.categorical(jax.random.fold_in(jax.random.key(3), k), corrected)
        drafted.append(before)
    return jnp.stack(drafted, axis=1), jnp.stack(shaped, axis=1), states


def _judged(target, tokens, drafts):
    """The target's logits [DRAWS, G + 1, V] at the anchor and every draft."""
    ids = jnp.tile(tokens[None], (DRAWS, 1)).at[:, ANCHOR + 1 : ANCHOR + 1 + G].set(drafts)
    # Whatever follows the drafts changes nothing before it; whole windows are needed.
    hidden = forward(target, SHALLOW, ids[:, :JUDGED]).hidden
    return logits(target, hidden[:, ANCHOR : ANCHOR + 1 + G])


def _plain_sampling(rows):
    zero, one = jnp.zeros(rows), jnp.ones(rows)
    seeds = jnp.stack([jnp.arange(rows), jnp.full(rows, 5)], axis=1).astype(jnp.uint32)
    return SamplingRows(
        temperature=one,
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=one,
        min_p=zero,
        presence_penalty=zero,
        frequency_penalty=zero,
        repetition_penalty=one,
        seed=seeds,
        min_len=jnp.zeros(rows, jnp.int32),
        stop_ids=jnp.full((rows, 9), -1, jnp.int32),
    )


def test_greedy_replay_follows_the_text(models, continuations):
    """At temperature 0 a draft is accepted while it is the text's own token."""
    target, draft = models
    text = Text(
        *(x[:8] for x in continuations[:2]), jax.tree.map(lambda x: x[:, :8], continuations[2])
    )
    played = replay_rounds(
        draft,
        target.embed,
        target.head,
        SHALLOW,
        text,
        jnp.asarray(True),
        jax.random.key(2),
        rounds=LENGTH,
    )
    active, lens = np.asarray(played.active), np.asarray(played.accept_lens)
    anchors = np.full(8, ANCHOR)
    ends = np.asarray(text_ends(text.tokens, text.prompt_lens, SHALLOW.eos_token_id))
    bests = np.asarray(_best_tokens(draft, target, text))
    tokens = np.asarray(text.tokens)
    for number in range(LENGTH):
        assert (active[number] == (anchors + G <= ends)).all()
        for b in np.flatnonzero(active[number]):
            expected = tokens[b, anchors[b] + 1 : anchors[b] + 1 + G]
            matches = bests[b, anchors[b]] == expected
            assert lens[number, b] == np.cumprod(matches).sum()
            anchors[b] += lens[number, b] + 1
    assert active[0].any()
    assert not active[-1].any()


@jax.jit
def _best_tokens(draft, target, text):
    """Most probable draft [B, S, G] of every anchor and place, each behind the text's own token."""
    at = jnp.tile(jnp.arange(LENGTH - G), (len(text.tokens), 1))
    rows = sequence_rows(draft, SHALLOW, text.features.taps)
    window, visible = gather_window(rows, at, SHALLOW.sliding_window)
    owner = jnp.arange(len(at))[:, None, None]
    previous = text.tokens[owner, at[..., None] + jnp.arange(G)].reshape(-1, G)
    states, _ = run_blocks(
        draft,
        target.embed,
        SHALLOW,
        window,
        visible,
        anchors=previous[:, 0],
        positions=at.reshape(-1),
        fused=False,
    )
    shaped = base_logits(draft, target.head, SHALLOW, states)
    shaped = shaped + transition(draft, previous, jnp.float32)
    return jnp.argmax(shaped, axis=-1).reshape(*at.shape, G)


def test_text_ends_at_the_first_end_token_behind_the_prompt():
    tokens = jnp.array([[0, 1, 5, 6, 1, 1], [0, 5, 5, 5, 5, 5]])
    ends = text_ends(tokens, jnp.array([3, 1]), 1)
    np.testing.assert_array_equal(ends, [4, 5])


def test_collect_keeps_what_happened(models, continuations):
    target, draft = models
    text = Text(
        *(x[:8] for x in continuations[:2]), jax.tree.map(lambda x: x[:, :8], continuations[2])
    )
    played = replay_rounds(
        draft,
        target.embed,
        target.head,
        SHALLOW,
        text,
        jnp.asarray(True),
        jax.random.key(2),
        rounds=LENGTH,
    )
    everything, some = collect(played), collect(played, rows=3)
    assert len(everything.accept_lens) == np.asarray(played.active).sum()
    assert set(some.rows) == {0, 1, 2}
    assert len(some.accept_lens) == (everything.rows < 3).sum()
