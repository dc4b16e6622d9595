"""Verification of drafts on flat logit rows: how many are accepted, and the token that follows them.

Row i of a request with l admitted drafts (i = 0..l) is the target's distribution p_{i+1} of the token i+1 places
after the anchor. All rows are shaped by the request's own sampling parameters, the drafter's too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.sampling import NEVER, SamplingRows, Stream, draw, if_wanted, uniform

RESIDUAL_FLOOR = (
    1e-8  # below this mass the residual is rounding noise and the target itself is drawn from
)


class Method(enum.Enum):
    """How a draft is tested.

    `STANDARD` is rejection sampling: accept x with probability min(1, p(x)/q(x)), else draw from the residual.
    `COUPLED` draws draft and target with the same noise and accepts where they agree: the output is token for
    token what ordinary decoding with the same seed gives, at a lower acceptance.
    `SYNTHETIC` does the work of `STANDARD` and accepts by `decode.synthetic` instead: for benchmarks, as the text
    is no longer the target's.
    """

    STANDARD = "standard"
    COUPLED = "coupled"
    SYNTHETIC = "synthetic"


class LogitRows(NamedTuple):
    """Where each request's rows lie among C compacted logit rows."""

    base: jax.Array  # [R] first verification row of each request
    verify_lens: jax.Array  # [R] drafts admitted, 0..G
    positions: jax.Array  # [R] absolute position of the anchor


class Verdict(NamedTuple):
    """tokens [R, G + 1] int32: accepted drafts, then one token of the target; accept_lens [R] int32."""

    tokens: jax.Array
    accept_lens: jax.Array


def verify_standard(
    target: jax.Array,
    draft_tokens: jax.Array,
    draft_logprobs: jax.Array,
    draft_shaped: Callable[[jax.Array], jax.Array],
    where: LogitRows,
    rows: SamplingRows,
    judge: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    *,
    effort: Effort = Effort.AS_NEEDED,
) -> Verdict:
    """Rejection sampling (Leviathan et al. 2023; greedy is its limit at temperature 0).

    Args:
      target: float32 [C, V] shaped target logits. draft_tokens: int32 [R, G].
      draft_logprobs: float32 [R, G], log q(x). draft_shaped: int32 [R] -> float32 [R, V], the shaped draft logits
        of one drafted position per request (only the first rejected one is ever looked at).
      judge: coins float32 [R, G] and which drafts pass bool [R, G] -> which drafts pass instead.
      effort: what the rows need, or more.
    """

    def count_accepted(_: jax.Array) -> jax.Array:
        # [R, G] row that judges each draft
        row = where.base[:, None] + jnp.arange(draft_tokens.shape[1])
        row = jnp.minimum(row, target.shape[0] - 1)
        log_norm = jax.nn.logsumexp(target, axis=-1)
        log_p = target[row, draft_tokens] - log_norm[row]
        best = jnp.argmax(target, axis=-1)
        place = where.positions[:, None] + 1 + jnp.arange(draft_tokens.shape[1])
        coins = uniform(rows, place, Stream.ACCEPT)
        # The second test keeps a coin of exactly zero from accepting what the target never draws.
        passes = (jnp.log(coins) + draft_logprobs < log_p) & (log_p > NEVER / 2)
        passes = jnp.where(rows.is_greedy[:, None], draft_tokens == best[row], passes)
        if judge is not None:
            passes = judge(coins, passes)
        return _leading(passes, where.verify_lens)

    # A step that verifies nothing, as most do where the drafter rests, has nothing to toss coins for.
    is_any = jnp.any(where.verify_lens > 0)
    accept_lens = if_wanted(effort, is_any, count_accepted, jnp.zeros_like(where.verify_lens))

    final_row = jnp.minimum(where.base + accept_lens, target.shape[0] - 1)
    rejected = accept_lens < where.verify_lens
    final = target[final_row]

    def with_residual(final: jax.Array) -> jax.Array:
        p = jax.nn.softmax(final, axis=-1)
        q = jax.nn.softmax(
            draft_shaped(jnp.minimum(accept_lens, draft_tokens.shape[1] - 1)), axis=-1
        )
        residual = jnp.maximum(p - q, 0.0)
        usable = rejected & ~rows.is_greedy & (jnp.sum(residual, axis=-1) > RESIDUAL_FLOOR)
        return jnp.where(usable[:, None], jnp.log(residual), final)

    final = if_wanted(effort, jnp.any(rejected & ~rows.is_greedy), with_residual, final)
    place = where.positions + accept_lens + 1
    last = draw(final, rows, place, effort=effort)
    return Verdict(_append(draft_tokens, last, accept_lens), accept_lens)


def verify_coupled(
    target: jax.Array,
    draft_tokens: jax.Array,
    where: LogitRows,
    rows: SamplingRows,
    row_of: jax.Array,
    *,
    effort: Effort = Effort.AS_NEEDED,
) -> Verdict:
    """The target draws every row with its own noise; a draft is accepted where it is that very token.

    Args:
      target: float32 [C, V] shaped. row_of: int32 [C], request of each logit row (R or more where unused).
      effort: what the rows need, or more.
    """
    count = target.shape[0]
    owner = jnp.minimum(row_of, where.base.shape[0] - 1)
    place = where.positions[owner] + 1 + jnp.arange(count) - where.base[owner]
    drawn = draw(target, rows.take(owner), jnp.maximum(place, 0), effort=effort)
    width = draft_tokens.shape[1]
    row = jnp.minimum(where.base[:, None] + jnp.arange(width + 1), count - 1)
    own = drawn[row]  # [R, G + 1]
    accept_lens = _leading(own[:, :width] == draft_tokens, where.verify_lens)
    last = jnp.take_along_axis(own, accept_lens[:, None], axis=1)[:, 0]
    return Verdict(_append(draft_tokens, last, accept_lens), accept_lens)


def _leading(passes: jax.Array, verify_lens: jax.Array) -> jax.Array:
    """Length of the accepted prefix within the admitted one: int32 [R]."""
    admitted = jnp.arange(passes.shape[1]) < verify_lens[:, None]
    return jnp.sum(
        jnp.cumprod((passes & admitted).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32
    )


def _append(draft_tokens: jax.Array, last: jax.Array, accept_lens: jax.Array) -> jax.Array:
    """Accepted drafts followed by the target's token; what lies behind has no meaning."""
    padded = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    place = jnp.arange(padded.shape[1])
    return jnp.where(place == accept_lens[:, None], last[:, None], padded).astype(jnp.int32)
