"""Output tokens per second that vLLM published for its adaptive verification, read off its figures (about 1 %).

Other GPUs and other models than ours: only ratios within a sweep are comparable, and only in their shape.
"""

from __future__ import annotations

Sweep = dict[int, dict[str, float]]
"""Concurrency -> arm -> tokens per second."""


def _sweep(rows: dict[int, tuple[float, float, float, float]]) -> Sweep:
    arms = ("none", "fixed-5", "fixed-7", "adaptive")
    return {concurrency: dict(zip(arms, values)) for concurrency, values in rows.items()}


FLASH_CAPTURE_1024 = _sweep(
    {
        1: (168, 386, 386, 378),
        16: (1671, 2412, 2871, 2903),
        32: (2606, 3635, 4290, 4555),
        64: (3818, 5657, 6164, 6748),
        128: (5490, 7406, 4239, 9884),
        256: (8455, 5295, 4792, 11155),
    }
)
"""DeepSeek-V4-Flash-0731 on four B300, step sizes captured up to 1024 tokens."""

PRO_FULL_CAPTURE = _sweep(
    {
        1: (101, 251, 251, 269),
        16: (1124, 1939, 1878, 2037),
        32: (1664, 3071, 2939, 3361),
        64: (2774, 4931, 4611, 5197),
        128: (4406, 6846, 6250, 7417),
        256: (6323, 8766, 7609, 9719),
    }
)
"""DeepSeek-V4-Pro-0813 on eight B300, captured up to 4096 tokens, which is every decoding step."""
