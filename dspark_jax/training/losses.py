"""The drafter's losses (DSpark paper, section on training)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

CE_WEIGHT = 0.1
TV_WEIGHT = 0.9
CONFIDENCE_WEIGHT = 1.0
# The paper writes exp(-(k-1)/block length); every released configuration has 4 here.
_DECAY = 4.0


class DraftLosses(NamedTuple):
    """Means over the blocks of a batch, float32. Position k of a block weighs exp(-(k-1)/4)."""

    total: jax.Array
    ce: jax.Array  # nats of the text's own tokens under the drafter
    tv: jax.Array  # |q - p| summed over the vocabulary, 0 to 2
    confidence: jax.Array  # cross-entropy of the confidence with the acceptance probability
    acceptance: jax.Array  # [G] mean acceptance probability of each position
    confidence_bias: jax.Array  # [G] mean confidence minus `acceptance`


def acceptance_probability(draft_logits: jax.Array, target_logits: jax.Array) -> jax.Array:
    """1 - |q - p| / 2 = sum of min(p, q): float32 [...] of logits [..., V] at temperature 1."""
    q, p = jax.nn.softmax(draft_logits), jax.nn.softmax(target_logits)
    return jnp.clip(1.0 - 0.5 * jnp.sum(jnp.abs(q - p), axis=-1), 0.0, 1.0)


def draft_losses(
    draft_logits: jax.Array,
    target_logits: jax.Array,
    labels: jax.Array,
    confidence_logits: jax.Array,
) -> DraftLosses:
    """Losses of blocks in which every position counts.

    Args:
      draft_logits, target_logits: float32 [N, G, V], with the transition of the text's own previous token.
      labels: int32 [N, G], the text. confidence_logits: float32 [N, G].
    """
    weights = jnp.exp(-jnp.arange(labels.shape[1]) / _DECAY)
    weights = weights / jnp.sum(weights)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(weights * jnp.mean(x, axis=0))

    ce = optax.softmax_cross_entropy_with_integer_labels(draft_logits, labels)
    q, p = jax.nn.softmax(draft_logits), jax.nn.softmax(target_logits)
    tv = jnp.sum(jnp.abs(q - p), axis=-1)
    accepted = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * tv, 0.0, 1.0))
    confidence = optax.sigmoid_binary_cross_entropy(confidence_logits, accepted)
    ce, tv_mean, confidence = mean(ce), mean(tv), mean(confidence)
    return DraftLosses(
        total=CE_WEIGHT * ce + TV_WEIGHT * tv_mean + CONFIDENCE_WEIGHT * confidence,
        ce=ce,
        tv=tv_mean,
        confidence=confidence,
        acceptance=jnp.mean(accepted, axis=0),
        confidence_bias=jnp.mean(jax.nn.sigmoid(confidence_logits) - accepted, axis=0),
    )
