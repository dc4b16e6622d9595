"""A draw from a softmax by inverting its distribution function: two uniform numbers for a whole vocabulary.

Gumbel noise, which `sampling.draw` adds, costs a random number for every token of the vocabulary. Where nothing
needs to be drawn with the same noise twice, two numbers do: one picks a block of tokens, the other a token in it.
Two, because a single float32 number could not tell the tokens of a large vocabulary apart.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.sampling import NEVER, SamplingRows, if_wanted

NUMBERS = 2
"""Uniform numbers that a draw uses."""


def draw_draft(
    shaped: jax.Array,
    rows: SamplingRows,
    numbers: jax.Array,
    *,
    effort: Effort = Effort.AS_NEEDED,
) -> jax.Array:
    """One token per row as `draw_by_inversion`, but the most likely one where the temperature is 0: int32 [C].

    `effort` is what the rows need, or more.
    """

    def drawn(best: jax.Array) -> jax.Array:
        return jnp.where(rows.is_greedy, best, draw_by_inversion(shaped, numbers))

    best = jnp.argmax(shaped, axis=1).astype(jnp.int32)
    return if_wanted(effort, ~jnp.all(rows.is_greedy), drawn, best)


def draw_by_inversion(shaped: jax.Array, numbers: jax.Array) -> jax.Array:
    """One token per row, int32 [C], from the softmax of shaped logits float32 [C, V], finite.

    `numbers` float32 [C, NUMBERS] are independent and uniform in [0, 1). A token without probability, such as a
    masked one, is never drawn.
    """
    rows, vocab = shaped.shape
    size = 1 << math.ceil(math.log2(vocab) / 2)
    blocks = jnp.pad(shaped, ((0, 0), (0, -vocab % size)), constant_values=NEVER)
    blocks = blocks.reshape(rows, -1, size)
    top = jnp.max(shaped, axis=1)[:, None]
    block = _place_of(numbers[:, 0], jnp.sum(jnp.exp(blocks - top[..., None]), axis=2))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + _place_of(numbers[:, 1], jnp.exp(inside - top))


def _place_of(share: jax.Array, mass: jax.Array) -> jax.Array:
    """Where the running sum of `mass` [C, N] first exceeds `share` [C] of the whole: int32 [C].

    Sums of float32 may differ in their last bits from one place to the next, so places without mass are left out.
    """
    size = mass.shape[1]
    # A product: XLA makes a running sum of many small steps.
    ones = jnp.triu(jnp.ones((size, size), jnp.float32))
    sums = jnp.matmul(mass, ones, precision=jax.lax.Precision.HIGHEST)
    sums = jnp.where(mass > 0, sums, -1.0)
    goal = share * jnp.max(sums, axis=1)
    return jnp.argmax(sums > goal[:, None], axis=1).astype(jnp.int32)
