"""Sequential and confidence heads, shared by both drafter layouts.

Paper: DSpark (arXiv 2607.05147). The backbone gives base logits for all draft slots at once; the
Markov head adds a bias that depends on the token just drafted, slot by slot; the confidence head
estimates the probability that the slot's token is accepted, given that all before it were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ref.scope import Scope

MARKOV_KINDS = ("vanilla", "gated", "rnn")

Choose = Callable[[int, Tensor], int]
"""Picks a token for a slot: ``choose(slot, logits [V]) -> token id``."""


@dataclass(frozen=True)
class Proposal:
    """A draft: ``tokens`` int ``[G]``, ``logits [G, V]`` and ``confidences [G]``.

    The logits include the Markov bias and no temperature: the draft distribution is their
    softmax at the request's temperature. Confidence k is conditional on acceptance before k and
    depends on tokens before k only. It is None where the drafter has no confidence head.
    """

    tokens: Tensor
    logits: Tensor
    confidences: Tensor | None


def choose_greedy(slot: int, logits: Tensor) -> int:
    """Choose the most likely token, whatever the slot."""
    return int(logits.argmax())


def sample_sequentially(
    markov: Scope, kind: str, base_logits: Tensor, hidden: Tensor, anchor: int, choose: Choose
) -> tuple[Tensor, Tensor]:
    """Draft slot by slot from ``base_logits [G, V]``; returns tokens ``[G]``, logits ``[G, V]``.

    ``markov`` is the ``markov_head`` scope, ``kind`` one of ``MARKOV_KINDS``, and ``hidden
    [G, d]`` the backbone output that gated and rnn heads read. ``anchor`` precedes slot 0.
    """
    if kind not in MARKOV_KINDS:
        raise ValueError(f"markov head {kind!r} is none of {MARKOV_KINDS}")
    tokens, corrected = [], []
    previous = anchor
    state = torch.zeros(markov["markov_w1.weight"].shape[1])
    for slot, logits in enumerate(base_logits):
        embedded = markov["markov_w1.weight"][previous]
        if kind == "gated":
            gate = torch.cat([hidden[slot], embedded]) @ markov["gate_proj.weight"].T
            features = torch.sigmoid(gate + markov["gate_proj.bias"]) * embedded
        elif kind == "rnn":
            joint = torch.cat([state, embedded, hidden[slot]]) @ markov["joint_proj.weight"].T
            gate, candidate, output = (joint + markov["joint_proj.bias"]).chunk(3)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            features = torch.tanh(output)
        else:
            features = embedded
        corrected.append(logits + markov["markov_w2.weight"] @ features)
        previous = choose(slot, corrected[-1])
        tokens.append(previous)
    return torch.tensor(tokens), torch.stack(corrected)


def confidences(
    scope: Scope, hidden: Tensor, anchor: int, tokens: Tensor, with_markov: bool = True
) -> Tensor:
    """Conditional acceptance estimates ``[G]``, from ``hidden [G, d]`` and the tokens before.

    ``scope`` holds ``confidence_head`` and ``markov_head``. Slot k reads the Markov embedding of
    the token before it (the anchor for slot 0), always the plain row. A bias is used if stored.
    """
    features = hidden
    if with_markov:
        before = torch.cat([torch.tensor([anchor]), tokens[:-1]])
        features = torch.cat([hidden, scope["markov_head.markov_w1.weight"][before]], dim=-1)
    logits = scope.linear("confidence_head.proj", features).squeeze(-1)
    if "confidence_head.proj.bias" in scope:
        logits = logits + scope["confidence_head.proj.bias"]
    return torch.sigmoid(logits)
