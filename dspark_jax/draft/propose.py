"""One proposal per request: the backbone once, then G cheap sequential draws through the Markov head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.draft.backbone import run_block
from dspark_jax.draft.heads import calibrate, confidence_logits, transition_logits
from dspark_jax.draft.params import DraftParams
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model.params import Params
from dspark_jax.model.transformer import logits

# (corrected logits [R, V], draft position k, tokens drafted so far [R, G] with -1 ahead, what was kept so far)
# -> token int32 [R], its log-probability float32 [R], what is kept now
Chooser = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, jax.Array, Any]]


# (state, token before [R], draft position k) -> state, transition logits float32 [R, V]
Transition = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


class Proposal(NamedTuple):
    """G drafted tokens for each of R requests."""

    tokens: jax.Array  # [R, G] int32
    logprobs: jax.Array  # [R, G] float32, log q of each token
    confidences: jax.Array  # [R, G] float32, conditional and calibrated
    kept: Any  # what the chooser kept of the distributions


def propose(
    params: DraftParams,
    target: Params,
    cfg: ModelConfig,
    window: jax.Array,
    *,
    anchors: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    is_row: jax.Array,
    choose: Chooser,
    kept: Any,
    dispatch: Dispatch,
) -> Proposal:
    """Draft from `anchors` int32 [R] at `positions` [R] with the context ring of `slots` [R].

    The token of slot k is drawn by `choose` from base logits + transition logits of the token before it (DSpark
    section on the semi-autoregressive head). `choose` keeps of that what it wants, beginning with `kept`: all of
    it together, for a large vocabulary, would be a copy too many. Rows with `is_row` False have no meaning.
    """
    hidden = run_block(
        params,
        target,
        cfg,
        window,
        anchors=anchors,
        positions=positions,
        slots=slots,
        is_row=is_row,
        dispatch=dispatch,
    )
    base = logits(target, rms_norm(hidden, params.g_norm, cfg.rms_norm_eps))  # [R, G, V]
    tokens, logprobs, kept = draw_in_sequence(
        base,
        (),
        lambda state, previous, k: (state, transition_logits(params, previous)),
        anchors=anchors,
        choose=choose,
        kept=kept,
    )
    before = tokens_before(anchors, tokens)
    return Proposal(
        tokens=tokens,
        logprobs=logprobs,
        confidences=calibrate(params, confidence_logits(params, hidden, before)),
        kept=kept,
    )


def draw_in_sequence(
    base: jax.Array,
    state: Any,
    transition: Transition,
    *,
    anchors: jax.Array,
    choose: Chooser,
    kept: Any,
) -> tuple[jax.Array, jax.Array, Any]:
    """Draw G tokens left to right from `base` float32 [R, G, V] corrected by the token before each.

    `transition` starts with `state`, `choose` with `kept`; the first token follows `anchors` int32 [R].

    Returns:
      tokens int32 [R, G], their log-probabilities float32 [R, G], and what `choose` kept.
    """
    drafts = base.shape[1]
    nothing = jnp.full((anchors.shape[0], drafts), -1, jnp.int32)

    def draw_one(carry, k):
        state, previous, drafted, kept = carry
        state, bias = transition(state, previous, k)
        token, logprob, kept = choose(base[:, k] + bias, k, drafted, kept)
        return (state, token, drafted.at[:, k].set(token), kept), logprob

    start = (state, anchors, nothing, kept)
    (_, _, tokens, kept), logprobs = jax.lax.scan(draw_one, start, jnp.arange(drafts))
    return tokens, logprobs.T, kept


def tokens_before(anchors: jax.Array, tokens: jax.Array) -> jax.Array:
    """The token before each drafted one, int32 [R, G]."""
    return jnp.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)


def token_logprobs(shaped: jax.Array, tokens: jax.Array) -> jax.Array:
    """log q of each token int32 [...] under shaped logits [..., V]."""
    own = jnp.take_along_axis(shaped, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(shaped, axis=-1)
