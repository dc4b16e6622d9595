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
DRAWS, ANCHOR, LENGTH = 2048, 10, 24


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
    expected = np.bincount(verified, minlength=G + 1) / DRAWS
    seen = np.bincount(replayed, minlength=G + 1) / DRAWS
    spread = np.sqrt(2 * np.maximum(expected, 0.01) / DRAWS)
    assert (np.abs(seen - expected) < 4.5 * spread).all(), (seen, expected)
    # Confidences look at all drafted tokens, the ones behind a rejection too.
    theirs, ours = np.asarray(z), np.asarray(played.confidence_logits[0])
    error = np.sqrt(2 / DRAWS) * theirs.std(axis=0) + 1e-3
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4.5 * error).all()
    assert (theirs.std(axis=0)[1:] > 0.01).all()


def _verified_rounds(models, tokens):
    """Accepted lengths and confidence logits of proposals that the target really judged."""
    target, draft = models
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
    drafts, q = jnp.stack(drafted, axis=1), jnp.stack(shaped, axis=1)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(q), drafts[..., None], axis=-1)[..., 0]
    ids = jnp.tile(tokens[None], (DRAWS, 1)).at[:, ANCHOR + 1 : ANCHOR + 1 + G].set(drafts)
    hidden = jax.jit(lambda ids: forward(target, SHALLOW, ids).hidden)(ids)
    judged = logits(target, hidden[:, ANCHOR : ANCHOR + 1 + G])
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
    z = confidence_logits(draft, jnp.broadcast_to(states, (DRAWS, *states.shape[1:])), previous)
    return np.asarray(verdict.accept_lens), z


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
    rows = sequence_rows(draft, SHALLOW, text.features.taps)
    for number in range(LENGTH):
        assert (active[number] == (anchors + G <= ends)).all()
        if not active[number].any():
            break
        at = np.where(active[number], anchors, 0)
        window, visible = gather_window(rows, jnp.asarray(at)[:, None], SHALLOW.sliding_window)
        first = np.asarray(text.tokens)[np.arange(8), at]
        states, _ = run_blocks(
            draft,
            target.embed,
            SHALLOW,
            window,
            visible,
            anchors=jnp.asarray(first),
            positions=jnp.asarray(at),
            fused=False,
        )
        base = base_logits(draft, target.head, SHALLOW, states)
        for b in np.flatnonzero(active[number]):
            accepted, before = 0, int(first[b])
            while accepted < G:
                best = int(
                    jnp.argmax(
                        base[b, accepted] + transition(draft, jnp.array(before), jnp.float32)
                    )
                )
                if best != int(text.tokens[b, at[b] + accepted + 1]):
                    break
                accepted, before = accepted + 1, best
            assert accepted == lens[number, b]
            anchors[b] += accepted + 1
    assert not active[-1].any()


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
