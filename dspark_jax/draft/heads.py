"""The drafter's two small heads: transition logits from the previous token, and confidence in each position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.draft.params import DraftParams
from dspark_jax.model.layers import linear_f32


def transition_logits(params: DraftParams, previous: jax.Array) -> jax.Array:
    """Markov bias B = W2 W1[x_{k-1}]: previous int32 [...] -> float32 [..., V] (DSpark, vanilla head)."""
    return linear_f32(params.markov_w1[previous], params.markov_w2)


def confidence_logits(params: DraftParams, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """Uncalibrated confidence logits z_k [..., G] float32.

    `hidden` [..., G, M] is the collapsed state *before* the final norm; `previous` int32 [..., G] the token before
    each drafted one. z_k never looks at the token it scores.
    """
    row = params.markov_w1[previous].astype(jnp.float32)
    features = jnp.concatenate([hidden.astype(jnp.float32), row], axis=-1)
    return jnp.einsum("...f,f->...", features, params.w_confidence[0].astype(jnp.float32))


def calibrate(params: DraftParams, z: jax.Array) -> jax.Array:
    """Conditional acceptance probabilities [..., G] of logits z: one scale and offset per position."""
    return jax.nn.sigmoid(z * params.calibration_scale + params.calibration_offset)
