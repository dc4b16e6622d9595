"""From logits to a distribution, and draws from it that depend on the request and the position only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.threshold import kth_largest, nucleus

NEVER = -1e30  # a masked logit: finite, so that a fully masked row stays defined


class Stream(enum.IntEnum):
    """Independent random streams of one (request, position).

    `TARGET` draws the token that the target itself emits (ordinary decoding, bonus and residual tokens, and both
    sides of coupled verification); `DRAFT` the drafter's proposals; `ACCEPT` the acceptance coins; the last two
    what `decode.synthetic` knows of a request and of a round.

    A position behind a rejection is drafted again, and its first draft may have shaped the confidences that size
    later budgets: draws from `DRAFT` are keyed by the round's anchor and the place in the round, so that the
    second draft is independent.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    SYNTHETIC_REQUEST = 3
    SYNTHETIC_ROUND = 4


class SamplingRows(struct.PyTreeNode):
    """Sampling parameters of rows, one entry per row in front; see `decode.plan.RowPlan` for meanings."""

    temperature: jax.Array  # [C] float32, 0 is greedy
    top_k: jax.Array  # [C] int32, 0 is off
    top_p: jax.Array  # [C] float32, 1 is off
    min_p: jax.Array  # [C] float32, 0 is off
    presence_penalty: jax.Array  # [C] float32
    frequency_penalty: jax.Array  # [C] float32
    repetition_penalty: jax.Array  # [C] float32, 1 is off
    seed: jax.Array  # [C, 2] uint32
    min_len: jax.Array  # [C] int32, total length before which no stop id may be drawn
    stop_ids: jax.Array  # [C, 9] int32, -1 where unused

    def take(self, index: jax.Array) -> SamplingRows:
        """Parameters of the rows in `index`."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    @property
    def is_greedy(self) -> jax.Array:
        """[C] bool."""
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> jax.Array:
        """[C] bool."""
        return (
            (self.presence_penalty != 0)
            | (self.frequency_penalty != 0)
            | (self.repetition_penalty != 1)
        )

    @property
    def is_filtered(self) -> jax.Array:
        """[C] bool."""
        return ~self.is_greedy & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))


def if_wanted(
    effort: Effort, wanted: jax.Array, change: Callable[[jax.Array], Any], x: jax.Array
) -> Any:
    """`change(x)` for all effort but `AS_NEEDED`, which leaves `x` alone unless `wanted`, a bool scalar.

    `change` must leave every row as it is that does not ask for it.
    """
    if effort is Effort.AS_NEEDED:
        return jax.lax.cond(wanted, change, lambda x: x, x)
    return change(x)


def holds_stops(rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Rows whose next token, at `positions` [C], must not end the text yet: bool [C]."""
    return positions < rows.min_len  # a token at position p makes the total length p + 1


def penalize(
    logits: jax.Array, rows: SamplingRows, output_counts: jax.Array, in_prompt: jax.Array
) -> jax.Array:
    """Repetition, frequency and presence penalties as vLLM applies them.

    Args:
      logits: float32 [C, V]. output_counts: int32 [C, V] including drafted tokens before the row's position.
      in_prompt: bool [C, V].
    """
    seen_out = output_counts > 0
    repetition = jnp.where(seen_out | in_prompt, rows.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency_penalty[:, None] * output_counts
    return logits - rows.presence_penalty[:, None] * seen_out


def forbid_stops(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    effort: Effort = Effort.AS_NEEDED,
) -> jax.Array:
    """Mask the stop ids of rows whose next token, at `positions` [C], would end the text before `min_len`."""
    early = holds_stops(rows, positions)

    def mask(logits: jax.Array) -> jax.Array:
        ids = jnp.where(early[:, None] & (rows.stop_ids >= 0), rows.stop_ids, logits.shape[1])
        row = jnp.arange(logits.shape[0])[:, None]
        return logits.at[row, ids].set(NEVER, mode="drop")

    return if_wanted(effort, jnp.any(early), mask, logits)


def scale_logits(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Logits [C, V] divided by the temperature; greedy rows pass unchanged."""
    return logits / jnp.where(rows.is_greedy, 1.0, rows.temperature)[:, None]


def shape_logits(
    logits: jax.Array, rows: SamplingRows, effort: Effort = Effort.AS_NEEDED
) -> jax.Array:
    """Temperature, then min-p, top-k and top-p: float32 [C, V] whose softmax is the sampling distribution.

    Greedy rows pass unchanged. Filters keep every token tied with the last one that fits.
    """
    filtered = rows.is_filtered
    return if_wanted(
        effort,
        jnp.any(filtered),
        lambda x: jnp.where(filtered[:, None], _filter(x, rows), x),
        scale_logits(logits, rows),
    )


def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    vocab = logits.shape[1]
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # p >= min_p * max(p), in logits; log(0) = -inf keeps everything.
    logits = jnp.where(logits >= peak + jnp.log(rows.min_p)[:, None], logits, NEVER)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    logits = jnp.where(logits >= kth_largest(logits, k)[:, None], logits, NEVER)
    fits = nucleus(logits, rows.top_p) | (rows.top_p >= 1)[:, None]
    return jnp.where(fits, logits, NEVER)


def row_keys(seed: jax.Array, places: jax.Array, stream: Stream) -> jax.Array:
    """One key for each of `places` int32 [C, ...], from the seed [C, 2] of its row, the place and the stream.

    A place is the absolute position of the token drawn, or whatever else tells the draws of a stream apart; less
    than 2**28.
    """

    def one(words: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        # Both in one number, because folding one in is dear on a CPU.
        return jax.random.fold_in(key, place * len(Stream) + int(stream))

    seed = seed.reshape(seed.shape[0], *[1] * (places.ndim - 1), 2)
    return jnp.vectorize(one, signature="(2),()->()")(seed, places)


def draw(
    shaped: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    *,
    effort: Effort = Effort.AS_NEEDED,
) -> jax.Array:
    """One token per row, int32 [C]: arg-max of shaped logits [C, V], plus Gumbel noise where temperature > 0.

    Ties go to the lowest id. The noise of a row depends on its seed and position alone, so that two draws with the
    same noise agree as often as their distributions do. `effort` is what the rows need, or more.
    """

    def noisy(shaped: jax.Array) -> jax.Array:
        keys = row_keys(rows.seed, positions, Stream.TARGET)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, shaped.shape[1:]))(keys)
        return shaped + jnp.where(rows.is_greedy[:, None], 0.0, noise)

    scores = if_wanted(effort, ~jnp.all(rows.is_greedy), noisy, shaped)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def uniform(
    rows: SamplingRows, places: jax.Array, stream: Stream, shape: tuple[int, ...] = ()
) -> jax.Array:
    """Uniform numbers in [0, 1), float32 [C, ..., *shape]: of this shape for each of `places` int32 [C, ...]."""
    keys = row_keys(rows.seed, places, stream)
    numbers = jax.vmap(lambda key: jax.random.uniform(key, shape))(keys.reshape(-1))
    return numbers.reshape(*places.shape, *shape)
