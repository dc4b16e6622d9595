"""Where a model's discrete choices hang by a thread: the margins of its top-k selections, by `torch_ref`.

Programs of different size add in different orders, so their sums differ in the last bit. That is invisible until
two experts, or two compressed entries, score the same up to that bit: then one program picks the one and another
the other, and the text behind may part although neither is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import torch_ref.attention
import torch_ref.moe
from torch_ref.checkpoint import load_checkpoint
from torch_ref.layers import largest_first
from torch_ref.model import forward

_CHOICES = {"entries": torch_ref.attention, "experts": torch_ref.moe}


@dataclass(frozen=True)
class Choice:
    """The closest selection at one position: what is selected, by which call, and last in minus first out."""

    kind: str
    number: (
        int  # of the calls of its kind, from 0: scored layers for experts, indexed ones for entries
    )
    margin: float  # in scores, whose size is about one

    def __str__(self) -> str:
        return f"{self.kind}, selection {self.number}, margin {self.margin:.1e}"


@contextmanager
def _recorded(choices: list[Choice]) -> Iterator[None]:
    """Append to `choices` one entry per selection at the last position."""

    def record(kind: str):
        def choose(scores: Tensor, count: int) -> Tensor:
            number = sum(choice.kind == kind for choice in choices)
            ranked = scores[0, -1].sort(descending=True).values
            margin = float("inf")
            if len(ranked) > count and torch.isfinite(ranked[count]):
                margin = float(ranked[count - 1] - ranked[count])
            choices.append(Choice(kind, number, margin))
            return largest_first(scores, count)

        return choose

    with ExitStack() as stack:
        for kind, module in _CHOICES.items():
            stack.enter_context(patch.object(module, "largest_first", record(kind)))
        yield


def closest_choice(folder: Path, token_ids: Sequence[int]) -> Choice:
    """The closest selection while the checkpoint reads the last of `token_ids`."""
    cfg, weights = load_checkpoint(folder)
    choices: list[Choice] = []
    with _recorded(choices):
        forward(weights, cfg, torch.tensor([list(token_ids)]))
    return min(choices, key=lambda choice: choice.margin)
