"""The distribution that a row samples from, the same way for target and drafter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.sampling import (
    NEVER,
    SamplingRows,
    forbid_stops,
    if_wanted,
    penalize,
    scale_logits,
    shape_logits,
)
from dspark_jax.decode.state import TokenCounts


def shaped_logits(
    raw: jax.Array,
    sampling: SamplingRows,
    positions: jax.Array,
    slots: jax.Array,
    counts: TokenCounts,
    drafted: jax.Array | None,
    effort: Effort = Effort.AS_NEEDED,
) -> jax.Array:
    """Sampling distribution of raw logits [C, V] for the token at `positions` [C], as shaped logits.

    `drafted` int32 [C, G] are drafted tokens before the position (-1: none): penalties count them as output. Both
    sides of a verification go through here, so p and q are shaped alike. `effort` is what the rows need, or more.
    """
    if effort is Effort.PLAIN:
        return scale_logits(raw, sampling)

    def with_penalties(raw: jax.Array) -> jax.Array:
        output = counts.output[slots]
        if drafted is not None:
            column = jnp.where(drafted >= 0, drafted, raw.shape[1])
            output = output.at[jnp.arange(raw.shape[0])[:, None], column].add(1, mode="drop")
        return penalize(raw, sampling, output, counts.prompt[slots])

    penalized = if_wanted(effort, jnp.any(sampling.has_penalty), with_penalties, raw)
    return shape_logits(forbid_stops(penalized, sampling, positions, effort), sampling, effort)


def only_the_best(shaped: jax.Array) -> jax.Array:
    """The distribution of greedy drafting: all mass on the arg-max of shaped logits [C, V]."""
    best = jnp.argmax(shaped, axis=-1)[:, None]
    return jnp.where(jnp.arange(shaped.shape[1]) == best, 0.0, NEVER)
