"""Fresh random seeds for property tests."""

from __future__ import annotations

import os


def fresh_seed() -> int:
    """Draw a 32-bit seed from the operating system and print it.

    pytest shows the output of a failing test, so the seed to replay is in its report.
    """
    seed = int.from_bytes(os.urandom(4))
    print(f"seed = {seed}")
    return seed
