"""Heads of a DeepSpec drafter: three kinds of transition logits, and confidence with a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.draft.dense_params import (
    Affine,
    DenseDraftConfig,
    DenseDraftParams,
    MarkovHead,
    MarkovKind,
)
from dspark_jax.model.layers import linear_f32


def start_state(cfg: DenseDraftConfig, rows: int) -> jax.Array:
    """State of the transition head before the first token, float32 [R, r]; only the recurrence uses it."""
    return jnp.zeros((rows, cfg.markov_rank), jnp.float32)


def transition_logits(
    head: MarkovHead,
    cfg: DenseDraftConfig,
    state: jax.Array,
    previous: jax.Array,
    hidden: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Bias that the token before puts on the logits of the next.

    Args:
      state: float32 [R, r]. previous: int32 [R]. hidden: [R, M], the block's output at the slot.

    Returns:
      The next state and float32 [R, V].
    """
    row = head.w1[previous].astype(jnp.float32)
    features = row
    hidden = hidden.astype(jnp.float32)
    if cfg.markov_head_type is MarkovKind.GATED:
        gate = _apply(head.mix, jnp.concatenate([hidden, row], axis=-1))
        features = jax.nn.sigmoid(gate) * row
    elif cfg.markov_head_type is MarkovKind.RNN:
        joint = _apply(head.mix, jnp.concatenate([state, row, hidden], axis=-1))
        keep, candidate, output = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        state = keep * state + (1 - keep) * jnp.tanh(candidate)
        features = jnp.tanh(output)
    return state, linear_f32(features, head.w2)


def confidences(
    params: DenseDraftParams, cfg: DenseDraftConfig, hidden: jax.Array, previous: jax.Array
) -> jax.Array:
    """Conditional acceptance estimates float32 [..., G]; all 1 where the drafter has no confidence head.

    `hidden` [..., G, M] is the block's output *after* the final norm, unlike in the released V4 layout; `previous`
    int32 [..., G] the token before each drafted one, whose plain Markov row is read whatever the transition head.
    """
    if params.confidence is None:
        return jnp.ones(previous.shape, jnp.float32)
    features = hidden.astype(jnp.float32)
    if cfg.confidence_head_with_markov:
        row = params.markov.w1[previous].astype(jnp.float32)
        features = jnp.concatenate([features, row], axis=-1)
    return jax.nn.sigmoid(_apply(params.confidence, features)[..., 0])


def _apply(affine: Affine | None, x: jax.Array) -> jax.Array:
    assert affine is not None
    return linear_f32(x, affine.w) + affine.b.astype(jnp.float32)
