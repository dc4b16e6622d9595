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
from dspark_jax.model.layers import rms_norm
from dspark_jax.model.params import Params
from dspark_jax.model.transformer import logits

# (corrected logits [R, V], draft position k, tokens drafted so far [R, G] with -1 ahead) -> token int32 [R],
# the shaped logits float32 [R, V] that it was drawn from
Chooser = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


# (state, token before [R], draft position k) -> state, transition logits float32 [R, V]
Transition = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


class Proposal(NamedTuple):
    """G drafted tokens for each of R requests."""

    tokens: jax.Array  # [R, G] int32
    shaped: jax.Array  # [R, G, V] float32, logits of the q that each token was drawn from
    logprobs: jax.Array  # [R, G] float32, log q of each token
    confidences: jax.Array  # [R, G] float32, conditional and calibrated


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
    dispatch: Dispatch,
) -> Proposal:
    """Draft from `anchors` int32 [R] at `positions` [R] with the context ring of `slots` [R].

    The token of slot k is drawn by `choose` from base logits + transition logits of the token before it (DSpark
    section on the semi-autoregressive head). Rows with `is_row` False have no meaning.
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
    tokens, shaped = draw_in_sequence(
        base,
        (),
        lambda state, previous, k: (state, transition_logits(params, previous)),
        anchors=anchors,
        choose=choose,
    )
    before = tokens_before(anchors, tokens)
    return Proposal(
        tokens=tokens,
        shaped=shaped,
        logprobs=drawn_logprobs(shaped, tokens),
        confidences=calibrate(params, confidence_logits(params, hidden, before)),
    )


def draw_in_sequence(
    base: jax.Array,
    state: Any,
    transition: Transition,
    *,
    anchors: jax.Array,
    choose: Chooser,
) -> tuple[jax.Array, jax.Array]:
    """Draw G tokens left to right from `base` float32 [R, G, V] corrected by the token before each.

    `transition` starts with `state`; the first token follows `anchors` int32 [R].

    Returns:
      tokens int32 [R, G], and the shaped logits float32 [R, G, V] that they were drawn from.
    """
    drafts = base.shape[1]
    nothing = jnp.full((anchors.shape[0], drafts), -1, jnp.int32)

    def draw_one(carry, k):
        state, previous, drafted = carry
        state, bias = transition(state, previous, k)
        token, shaped = choose(base[:, k] + bias, k, drafted)
        return (state, token, drafted.at[:, k].set(token)), shaped

    (_, _, tokens), shaped = jax.lax.scan(draw_one, (state, anchors, nothing), jnp.arange(drafts))
    return tokens, jnp.moveaxis(shaped, 0, 1)


def tokens_before(anchors: jax.Array, tokens: jax.Array) -> jax.Array:
    """The token before each drafted one, int32 [R, G]."""
    return jnp.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)


def drawn_logprobs(shaped: jax.Array, tokens: jax.Array) -> jax.Array:
    """log q of each token [R, G] under shaped logits [R, G, V]."""
    own = jnp.take_along_axis(shaped, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(shaped, axis=-1)
