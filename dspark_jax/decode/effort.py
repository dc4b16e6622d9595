"""How much a step does between logits and tokens. It imports nothing, because the host plans by it."""

from __future__ import annotations

import enum


class Effort(enum.IntEnum):
    """What rows ask for together, in ascending cost. All that suffice agree bit for bit.

    A GPU's host reads the predicate of every branch back and waits for it, so programs for one have no branches:
    the host, which knows what the rows ask for, chooses between two. On a CPU a branch costs nothing, while work
    for nobody and another program to compile do: one program looks at the rows when it runs.
    """

    PLAIN = 0  # greedy, or temperature alone
    FULL = 1  # all else besides: penalties, filters, stop ids held back, log-probabilities
    AS_NEEDED = 2  # decided at run time, by branches
