"""Decoding rounds replayed on text that the target has already written, exactly and without running it again.

Rejection sampling couples a draft d ~ q with the emitted token t ~ p: d is kept with probability
min(1, p(d)/q(d)), otherwise t comes from the residual (p - q)+. Read backwards, given t: the draft was t with
probability min(1, q(t)/p(t)), otherwise it was drawn from (q - p)+, and then the round goes on drafting behind a
token that will be thrown away. So accepted lengths, proposals and confidences have exactly the law that they have
in decoding, all positions of a proposal included. Greedy decoding compares the drafter's best token with the text.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.draft.heads import confidence_logits
from dspark_jax.draft.params import DraftParams
from dspark_jax.training.draft_forward import (
    base_logits,
    gather_window,
    run_blocks,
    sequence_rows,
    transition,
)
from dspark_jax.training.generate import Text
from dspark_jax.training.layers import wide_linear
from dspark_jax.training.losses import acceptance_probability

_NEVER = -1e30


class Round(NamedTuple):
    """One round of each sequence; with an axis of rounds in front where they are stacked."""

    active: jax.Array  # [B] whether the round happened
    accept_lens: jax.Array  # [B] int32, 0 ... G accepted drafts
    confidence_logits: jax.Array  # [B, G] float32, before calibration
    acceptance: jax.Array  # [B, G] float32, probability of acceptance along the text


class Replay(NamedTuple):
    """N rounds on the host, in no particular order."""

    accept_lens: np.ndarray  # [N] int32
    confidence_logits: np.ndarray  # [N, G] float32
    acceptance: np.ndarray  # [N, G] float32
    rows: np.ndarray  # [N] sequence of each round


def text_ends(tokens: jax.Array, prompt_lens: jax.Array, eos: int) -> jax.Array:
    """Position of the last token of the answer: the first end token behind the prompt, or the row's last.

    tokens int32 [B, S], prompt_lens int32 [B] -> int32 [B].
    """
    place = jnp.arange(tokens.shape[1])
    stops = (tokens == eos) & (place >= prompt_lens[:, None])
    return jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1), tokens.shape[1] - 1)


@functools.partial(jax.jit, static_argnames=("cfg", "rounds", "fused"))
def replay_rounds(
    params: DraftParams,
    embed: jax.Array,
    head: jax.Array,
    cfg: ModelConfig,
    text: Text,
    greedy: bool | jax.Array,
    key: jax.Array,
    *,
    rounds: int,
    fused: bool = False,
) -> Round:
    """Up to `rounds` rounds of every sequence of `text`, stacked [rounds, B, ...].

    The first anchor is the first token behind the prompt. A round happens if its whole block lies in the answer,
    so the last few tokens before an end are left out. With `greedy`, `text` must have been sampled at
    temperature 0.
    """
    assert cfg.draft is not None
    g = cfg.draft.block_size
    taps, hidden = text.features
    rows = sequence_rows(params, cfg, taps)
    ends = text_ends(text.tokens, text.prompt_lens, cfg.eos_token_id)
    owner = jnp.arange(len(text.tokens))

    def play(anchors: jax.Array, number: jax.Array) -> tuple[jax.Array, Round]:
        active = anchors + g <= ends
        at = jnp.where(active, anchors, 0)
        span = at[:, None] + jnp.arange(g)
        previous, labels = text.tokens[owner[:, None], span], text.tokens[owner[:, None], span + 1]
        window, visible = gather_window(rows, at[:, None], cfg.sliding_window)
        states, _ = run_blocks(
            params,
            embed,
            cfg,
            window,
            visible,
            anchors=previous[:, 0],
            positions=at,
            fused=fused,
        )
        base = base_logits(params, head, cfg, states)
        target = wide_linear(hidden[span, owner[:, None]], head)
        along = acceptance_probability(base + transition(params, previous, embed.dtype), target)
        log_p = jax.nn.log_softmax(target)
        noise = jax.random.fold_in(key, number)

        def draft(carry, k):
            before, alive = carry
            log_q = jax.nn.log_softmax(base[:, k] + transition(params, before, embed.dtype))
            coin_key, draw_key = jax.random.split(jax.random.fold_in(noise, k))
            label = labels[:, k]
            ratio = (log_q - log_p[:, k])[owner, label]
            coin = jnp.log(jax.random.uniform(coin_key, ratio.shape)) < ratio
            best = jnp.argmax(log_q, axis=-1)
            kept = alive & jnp.where(greedy, best == label, coin)
            excess = jnp.exp(log_q) - jnp.exp(log_p[:, k])
            excess = jnp.where(excess > 0, jnp.log(jnp.maximum(excess, 1e-38)), _NEVER)
            drawn = jax.random.categorical(draw_key, jnp.where(alive[:, None], excess, log_q))
            drawn = jnp.where(greedy, best, drawn)
            token = jnp.where(kept, label, drawn).astype(jnp.int32)
            return (token, kept), (before, kept)

        _, (before, kept) = jax.lax.scan(
            draft, (previous[:, 0], jnp.ones(len(at), bool)), jnp.arange(g)
        )
        accept_lens = jnp.sum(kept, axis=0, dtype=jnp.int32)
        z = confidence_logits(params, states, before.T)
        anchors = jnp.where(active, anchors + accept_lens + 1, anchors)
        return anchors, Round(active, accept_lens, z, along)

    return jax.lax.scan(play, text.prompt_lens.astype(jnp.int32), jnp.arange(rounds))[1]


def collect(played: Round, rows: int | None = None) -> Replay:
    """The rounds that happened in the first `rows` sequences (all by default), on the host."""
    active = np.asarray(played.active).copy()
    active[:, rows:] &= rows is None
    owner = np.broadcast_to(np.arange(active.shape[1]), active.shape)
    return Replay(
        accept_lens=np.asarray(played.accept_lens)[active],
        confidence_logits=np.asarray(played.confidence_logits)[active],
        acceptance=np.asarray(played.acceptance)[active],
        rows=owner[active],
    )
