"""Speculative decoding between two probability tables: the sampling code of the step without a model.

The target's logits of the next token depend on the last token, the drafter's too, so laws can be enumerated. Many
requests run side by side, each with its own seed, through the functions that the step itself uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.inversion import NUMBERS, draw_draft
from dspark_jax.decode.row_layout import MAX_STOP_IDS
from dspark_jax.decode.sampling import SamplingRows, Stream, uniform
from dspark_jax.decode.shaping import only_the_best, shaped_logits
from dspark_jax.decode.state import TokenCounts
from dspark_jax.decode.verify import LogitRows, Verdict, verify_standard

ANCHOR = 0
START = 5  # position of the first anchor


class Tables(NamedTuple):
    """Logits of the next token by the last one, [V, V] each, and confidences by the token before, [V]."""

    target: np.ndarray
    drafter: np.ndarray
    confidence: np.ndarray


class Draft(NamedTuple):
    """What a length policy may look at: confidences of this draft and of the one before, float32 [R, G]."""

    confidences: jax.Array
    stale: jax.Array
    coins: jax.Array  # [R] uniform numbers that nothing else depends on


Policy = Callable[[Draft], jax.Array]
"""How many drafts of each request are verified: [R]."""


def sampling_rows(count: int, seed: int, **values: float) -> SamplingRows:
    """The same sampling parameters for `count` requests, each with a seed of its own."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_len": 0,
    }
    integers = ("top_k", "min_len")
    seeds = np.random.default_rng(seed).integers(0, 2**32, (count, 2), dtype=np.uint32)
    return SamplingRows(
        **{
            name: jnp.full(
                count, values.get(name, default), jnp.int32 if name in integers else jnp.float32
            )
            for name, default in defaults.items()
        },
        seed=jnp.asarray(seeds),
        stop_ids=jnp.full((count, MAX_STOP_IDS), -1, jnp.int32),
    )


class _Texts(NamedTuple):
    anchors: jax.Array  # [R]
    positions: jax.Array  # [R]
    output: jax.Array  # [R, N + G + 1] tokens since the start, -1 ahead
    counts: jax.Array  # [R, V]
    stale: jax.Array  # [R, G]


def sample_texts(
    tables: Tables,
    rows: SamplingRows,
    key: jax.Array,
    policy: jax.Array,
    greedy_drafts: jax.Array,
    *,
    policies: Sequence[Policy],
    count: int,
    drafts: int,
) -> jax.Array:
    """The first `count` tokens after the anchor of every request, [R, count], by rounds of speculation.

    Rounds draft `drafts` tokens and verify as many as `policies[policy]` says, which may flip coins from `key`. In
    the first round the stale confidences are all 1.
    """
    requests, vocab = rows.temperature.shape[0], tables.target.shape[0]
    texts = _Texts(
        anchors=jnp.full(requests, ANCHOR, jnp.int32),
        positions=jnp.full(requests, START, jnp.int32),
        output=jnp.full((requests, count + drafts + 1), -1, jnp.int32),
        counts=jnp.zeros((requests, vocab), jnp.int32),
        stale=jnp.ones((requests, drafts), jnp.float32),
    )

    def one_round(i: jax.Array, texts: _Texts) -> _Texts:
        tokens, shaped, confidences = _draft(tables, rows, texts, drafts, greedy_drafts)
        coins = jax.random.uniform(jax.random.fold_in(key, i), (requests,))
        draft = Draft(confidences, texts.stale, coins)
        choices = [lambda d, f=f: f(d).astype(jnp.int32) for f in policies]
        verify_lens = jax.lax.switch(policy, choices, draft)
        verdict = _verify(tables, rows, texts, tokens, shaped, verify_lens)
        return _commit(texts, verdict, confidences)

    # Every round commits at least one token.
    return jax.lax.fori_loop(0, count, one_round, texts).output[:, :count]


def _draft(
    tables: Tables, rows: SamplingRows, texts: _Texts, drafts: int, greedy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [R, G], the shaped logits they were drawn from [R, G, V], confidences [R, G]."""
    requests = texts.anchors.shape[0]
    previous, tokens = texts.anchors, jnp.full((requests, drafts), -1, jnp.int32)
    shaped, confidences = [], []
    in_round = texts.positions[:, None] * drafts + jnp.arange(drafts)
    numbers = uniform(rows, in_round, Stream.DRAFT, (NUMBERS,))
    for k in range(drafts):
        place = texts.positions + 1 + k
        raw = tables.drafter[previous]
        q = shaped_logits(raw, rows, place, jnp.arange(requests), _counts(texts), tokens)
        shaped.append(jnp.where(greedy, only_the_best(q), q))
        confidences.append(tables.confidence[previous])
        previous = draw_draft(shaped[-1], rows, numbers[:, k])
        tokens = tokens.at[:, k].set(previous)
    return tokens, jnp.stack(shaped, axis=1), jnp.stack(confidences, axis=1)


def _verify(
    tables: Tables,
    rows: SamplingRows,
    texts: _Texts,
    tokens: jax.Array,
    shaped: jax.Array,
    verify_lens: jax.Array,
) -> Verdict:
    """Judge the drafts on flat rows, laid out as a step does: 1 + verify_len rows of each request in turn."""
    requests, drafts = tokens.shape
    base = jnp.cumsum(verify_lens + 1) - (verify_lens + 1)
    flat = jnp.arange(requests * (drafts + 1))
    owner = jnp.searchsorted(base, flat, side="right") - 1
    within = flat - base[owner]
    fed = jnp.concatenate([texts.anchors[:, None], tokens], axis=1)
    target = shaped_logits(
        tables.target[fed[owner, jnp.minimum(within, drafts)]],
        rows.take(owner),
        texts.positions[owner] + 1 + within,
        owner,
        _counts(texts),
        jnp.where(jnp.arange(drafts) < within[:, None], tokens[owner], -1),
    )
    own = jnp.take_along_axis(shaped, tokens[..., None], axis=2)[..., 0]
    return verify_standard(
        target,
        tokens,
        own - jax.nn.logsumexp(shaped, axis=-1),
        lambda k: shaped[jnp.arange(requests), k],
        LogitRows(base, verify_lens, texts.positions),
        rows,
    )


def _counts(texts: _Texts) -> TokenCounts:
    return TokenCounts(output=texts.counts, prompt=jnp.zeros(texts.counts.shape, bool))


def _commit(texts: _Texts, verdict: Verdict, confidences: jax.Array) -> _Texts:
    width = verdict.tokens.shape[1]
    slots, place = jnp.arange(texts.anchors.shape[0])[:, None], jnp.arange(width)
    kept = place <= verdict.accept_lens[:, None]
    column = texts.positions[:, None] - START + place
    column = jnp.where(kept, column, texts.output.shape[1])
    counted = jnp.where(kept, verdict.tokens, texts.counts.shape[1])
    last = jnp.take_along_axis(verdict.tokens, verdict.accept_lens[:, None], axis=1)[:, 0]
    return _Texts(
        anchors=last,
        positions=texts.positions + verdict.accept_lens + 1,
        output=texts.output.at[slots, column].set(verdict.tokens, mode="drop"),
        counts=texts.counts.at[slots, counted].add(1, mode="drop"),
        stale=confidences,
    )
