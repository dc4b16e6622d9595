"""Problems for tests and benchmarks of `route`, and random arguments for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

HASH_LAYERS, VOCABULARY = 2, 50


@dataclass(frozen=True)
class Case:
    """T tokens, of which the last `padding` are none, that choose k of E experts.

    `layer` of 4; with `hashed` the first two take their experts from a table. `ties`: few different logits and
    biases, so that many experts are equal. `extreme`: some logits far out, and one token with no other.
    """

    name: str
    tokens: int
    experts: int
    k: int
    layer: int = 3
    hashed: bool = False
    padding: int = 0
    ties: bool = False
    extreme: bool = False


FLASH: dict[str, Any] = {"experts": 256, "k": 6}
PRO: dict[str, Any] = {"experts": 384, "k": 6}

TEST_CASES = (
    Case("one_token", 1, 16, 2),
    Case("four_experts", 9, 4, 2, padding=2),
    Case("every_expert", 3, 7, 7),
    Case("one_expert", 5, 24, 1),
    Case("flash", 6, **FLASH, padding=1),
    Case("pro", 3, **PRO),
    Case("ties", 33, 24, 6, ties=True, padding=4),
    Case("no_other_expert", 2, 1, 1),
    Case("extreme", 17, 24, 4, extreme=True),
    Case("table", 11, 16, 3, layer=1, hashed=True, padding=3),
    Case("after_the_table", 11, 16, 3, layer=2, hashed=True, padding=3),
)


def make(case: Case, seed: int) -> dict[str, Any]:
    """Arguments of `route` by name, without `dispatch`; biases of other layers and the logits of padding are NaN.

    Sums of score and bias that decide a choice are equal or clearly apart: the choice is the same however the
    last digit of a score is rounded.
    """
    rng = np.random.default_rng(seed)
    bias = np.full((4, case.experts), np.nan, np.float32)
    levels = np.array([-0.5, 0.0, 0.25], np.float32)
    drawn = rng.standard_normal(case.experts, dtype=np.float32) * 0.3
    bias[case.layer] = rng.choice(levels, case.experts) if case.ties else drawn
    logits = np.empty((case.tokens, case.experts), np.float32)
    undecided = np.ones(case.tokens, bool)
    while undecided.any():
        logits[undecided] = _draw(case, rng, int(undecided.sum()))
        if case.extreme:
            logits[0] = -200.0
        undecided = _is_close(logits, bias[case.layer], case.k)
        # Of the token that has no other logits the bias alone decides.
        undecided[0] &= not case.extreme
    logits[case.tokens - case.padding :] = np.nan
    arguments: dict[str, Any] = {
        "logits": jnp.asarray(logits),
        "bias": jnp.asarray(bias),
        "layer": jnp.int32(case.layer),
        "k": case.k,
        "scale": 1.5,
        "is_token": jnp.arange(case.tokens) < case.tokens - case.padding,
    }
    if case.hashed:
        table = rng.random((HASH_LAYERS, VOCABULARY, case.experts)).argsort(-1)[..., : case.k]
        arguments["table"] = jnp.asarray(table, jnp.int32)
        ids = rng.integers(0, VOCABULARY, case.tokens)
        arguments["token_ids"] = jnp.asarray(ids, jnp.int32)
    return arguments


def _draw(case: Case, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """float32 [tokens, E] random logits."""
    shape = (tokens, case.experts)
    if case.ties:
        return rng.choice(np.array([-1.0, 0.5, 2.0], np.float32), shape)
    logits = rng.standard_normal(shape, dtype=np.float32) * 2
    if case.extreme:
        far = rng.choice(np.array([-3e38, -1e4, -200.0, 200.0, 1e4, 1e8], np.float32), shape)
        logits = np.where(rng.random(shape) < 0.3, far, logits)
    return logits


def _is_close(logits: np.ndarray, bias: np.ndarray, k: int) -> np.ndarray:
    """bool [T]: whether two of the k + 1 highest sums differ by no more than rounding may move them."""
    scores = np.sqrt(np.logaddexp(logits, np.float32(0)))
    highest = -np.sort(-(scores + bias), axis=1)[:, : k + 1]
    gaps = highest[:, :-1] - highest[:, 1:]
    slack = 1e-5 * np.maximum(1.0, np.abs(highest[:, :-1]))
    return np.asarray(((gaps > 0) & (gaps < slack)).any(axis=1))
