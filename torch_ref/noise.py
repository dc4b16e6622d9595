"""Random numbers that depend on what they are for, never on the order they are asked in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """Noise of one request; every draw is keyed by the seed, a stream name and integers."""

    seed: int

    def uniform(self, stream: str, *key: int) -> float:
        """Uniform number in [0, 1)."""
        return float(torch.rand((), generator=self._generator(stream, key), dtype=torch.float64))

    def gumbel(self, size: int, stream: str, *key: int) -> Tensor:
        """Standard Gumbel numbers, float32 ``[size]``."""
        exponential = torch.empty(size).exponential_(generator=self._generator(stream, key))
        return -exponential.log()

    def _generator(self, stream: str, key: tuple[int, ...]) -> torch.Generator:
        digest = hashlib.blake2b(repr((self.seed, stream, key)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest))
