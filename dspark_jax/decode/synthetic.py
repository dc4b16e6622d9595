"""Acceptance that is drawn instead of earned, so that weights without meaning can be benchmarked.

A round's draft survives position k iff a standard normal number exceeds t_k = Phi^-1(1 - s_k), where s_k is the
wanted survival. That number is a sum of three independent ones: the request's (variance `request_spread`), the
round's (`round_spread`), and the rest, which nobody knows before the draft is judged. So the survival of position
k is s_k over all requests and rounds, and given request and round

    S_k = Phi((sqrt(request_spread) z_request + sqrt(round_spread) z_round - t_k) / sqrt(1 - both spreads)).

The drafter publishes the conditional confidences c_k = S_k / S_{k-1}; later a coin of its own accepts draft k with
probability c_k. Both numbers z depend on (request seed, position of the round's anchor) alone and on no draft, and
the coins are independent of them: what decides whether a draft is verified is known before it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr, ndtri

from dspark_jax.decode.sampling import SamplingRows, Stream, row_keys

# Survivals of exactly 0 and 1 have no finite threshold; float32 tells these from them no further.
_LEAST, _MOST = 1e-6, 1 - 1e-6


class _Profile(NamedTuple):
    """`pack_profile`'s numbers by name."""

    rates: jax.Array  # [G]
    request_spread: jax.Array
    round_spread: jax.Array
    miscalibration: jax.Array
    is_enabled: jax.Array  # bool


def pack_profile(
    rates: Sequence[float],
    *,
    request_spread: float,
    round_spread: float,
    miscalibration: float = 1.0,
    is_enabled: bool = True,
) -> np.ndarray:
    """The profile as the one array, float32 [G + 4], that a decoding state carries.

    Args:
      rates: survival of every drafted position, non-increasing, in [0, 1].
      request_spread, round_spread: shares of the variance, >= 0 and less than 1 together.
      miscalibration: published confidences have this multiple of the true log-odds; 1 is calibrated, more
        is overconfident wherever acceptance is likelier than not.
      is_enabled: otherwise drafts are judged, and confidences given, by the model itself.
    """
    numbers = [*rates, request_spread, round_spread, miscalibration, float(is_enabled)]
    return np.array(numbers, np.float32)


def acceptance(profile: jax.Array, rows: SamplingRows, anchors: jax.Array) -> jax.Array:
    """True conditional probability that each drafted position is accepted: float32 [R, G].

    `profile` is `pack_profile`'s array, `anchors` int32 [R] the positions of the rounds' anchors.
    """
    given = _unpack(profile)
    request = _normal(rows, jnp.zeros_like(anchors), Stream.SYNTHETIC_REQUEST)
    this_round = _normal(rows, anchors, Stream.SYNTHETIC_ROUND)
    known = jnp.sqrt(given.request_spread) * request + jnp.sqrt(given.round_spread) * this_round
    unknown = jnp.sqrt(1 - given.request_spread - given.round_spread)
    thresholds = -ndtri(jnp.clip(given.rates, _LEAST, _MOST))
    log_survival = log_ndtr((known[:, None] - thresholds) / unknown)
    before = jnp.pad(log_survival[:, :-1], ((0, 0), (1, 0)))
    return jnp.exp(jnp.minimum(log_survival - before, 0.0))


def publish(
    profile: jax.Array, rows: SamplingRows, anchors: jax.Array, confidences: jax.Array
) -> jax.Array:
    """What the drafter says in place of its own `confidences` [R, G], if the profile is enabled."""
    given = _unpack(profile)
    true = acceptance(profile, rows, anchors)
    inside = jnp.clip(true, _LEAST, _MOST)
    log_odds = jnp.log(inside) - jnp.log1p(-inside)
    said = jax.nn.sigmoid(given.miscalibration * log_odds)
    said = jnp.where(given.miscalibration == 1, true, said)
    # Chosen at run time, so that the confidence head is computed whatever the profile.
    return jnp.where(given.is_enabled, said, confidences)


def judge(
    profile: jax.Array,
    rows: SamplingRows,
    anchors: jax.Array,
    coins: jax.Array,
    passes: jax.Array,
) -> jax.Array:
    """Which drafts pass, bool [R, G], in place of the model's own `passes`, if the profile is enabled.

    `coins` [R, G] are the uniform numbers in [0, 1) that rejection sampling uses.
    """
    drawn = coins < acceptance(profile, rows, anchors)
    return jnp.where(_unpack(profile).is_enabled, drawn, passes)


def _unpack(profile: jax.Array) -> _Profile:
    return _Profile(profile[:-4], profile[-4], profile[-3], profile[-2], profile[-1] > 0)


def _normal(rows: SamplingRows, positions: jax.Array, stream: Stream) -> jax.Array:
    """One standard normal number per row, float32 [R]."""
    return jax.vmap(lambda key: jax.random.normal(key))(row_keys(rows.seed, positions, stream))
