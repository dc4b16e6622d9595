"""How much a step does between logits and tokens. It imports nothing, because the host plans by it."""

from __future__ import annotations

import enum


class Effort(enum.IntEnum):
    """What rows ask for together, in ascending cost. All that suffice agree bit for bit.

    A GPU's host reads the predicate of every branch back and waits for it, so a program without branches serves
    the rows that need none, and the host, which knows what they ask for, chooses the program.
    """

    PLAIN = 0  # greedy, or temperature alone
    FULL = 1  # penalties, filters, stop ids held back, or log-probabilities
