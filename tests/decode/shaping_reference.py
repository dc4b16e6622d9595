"""The sampling distribution in NumPy, float64, one row at a time, from its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sampling_probs(
    logits: np.ndarray,
    *,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> np.ndarray:
    """Probabilities [V] of the next token after `prompt` and `output`.

    Penalties, forbidden ids, temperature, then min-p, top-k and top-p, each over what the one before has left. A
    token as likely as the last one kept is kept.
    """
    logits = np.array(logits, np.float64)
    for token in {*output, *prompt}:
        logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    for token in set(output):
        logits[token] -= frequency_penalty * list(output).count(token) + presence_penalty
    logits[list(forbidden)] = -np.inf
    if temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < min_p * weights.max()] = 0
    if top_k:
        weights[weights < np.sort(weights)[::-1][:top_k][-1]] = 0
    probs = weights / weights.sum()
    if top_p < 1:
        ranked = np.sort(probs)[::-1]
        kept = ranked[: int((np.cumsum(ranked) < top_p).sum()) + 1]
        probs[probs < kept[-1]] = 0
    return probs / probs.sum()
