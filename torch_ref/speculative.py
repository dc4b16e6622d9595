"""Speculative decoding of one request: draft, verify a prefix, commit, roll back.

Two methods of verification. ``standard`` is rejection sampling: the output has the target's law.
``coupled`` draws draft and target tokens with the same noise and accepts a draft that equals the
target's own draw: the output is, token for token, :func:`sample_no_cache` with the same seed. At
temperature 0 both are the comparison with the most likely token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from torch_ref.config import TorchRefConfig
from torch_ref.decode import new_cache, prefill, rollback, step
from torch_ref.heads import Choose, Proposal
from torch_ref.model import forward, tap_features
from torch_ref.noise import Noise

METHODS = ("standard", "coupled")
_MIN_RESIDUAL = 1e-8


class Drafter(Protocol):
    """What :func:`generate` needs of a drafter; it holds the context of one request."""

    length: int
    draft_len: int
    target_layer_ids: tuple[int, ...]

    def extend(self, features: Tensor) -> None:
        """Append the features ``[T, m * C]`` of the next T committed tokens."""
        ...

    def propose(self, anchor: int, choose: Choose) -> Proposal:
        """Draft after ``anchor``, the token at position ``length``."""
        ...


@dataclass
class Generation:
    """Generated ``tokens`` and, per round, the draft length verified and accepted."""

    tokens: list[int] = field(default_factory=list)
    verify_lens: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)


def generate(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    drafter: Drafter,
    prompt: Sequence[int],
    n: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    method: str = "standard",
    choose_verify_len: Callable[[Tensor | None], int] | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Continue ``prompt`` by ``n`` tokens, or through the first of ``stop_ids``.

    ``drafter`` must be without context. ``choose_verify_len(confidences)`` says how many drafts
    to verify, all by default; for the output to keep the target's law, whether slot k is
    verified may depend on confidences up to k and on the past, not on later ones.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {METHODS}")
    if n < 1:
        raise ValueError(f"n={n} tokens asked for, at least 1 is needed")
    noise = Noise(seed)
    cache = new_cache(cfg, len(prompt) + n + drafter.draft_len, drafter.draft_len + 1)
    logits, states = prefill(weights, cfg, cache, prompt)
    drafter.extend(tap_features(states, drafter.target_layer_ids)[0])
    draw = _TargetDraw(noise, temperature)
    result = Generation([draw(logits[-1], len(prompt))])
    while len(result.tokens) < n and result.tokens[-1] not in stop_ids:
        anchor, position = result.tokens[-1], cache.length
        proposal = drafter.propose(anchor, _draft_choice(noise, temperature, method, position))
        verify_len = drafter.draft_len
        if choose_verify_len is not None:
            verify_len = choose_verify_len(proposal.confidences)
        drafts = proposal.tokens[:verify_len].tolist()
        logits, states = step(weights, cfg, cache, [anchor, *drafts], position)
        if method == "standard" and temperature > 0:
            accept_len, token = verify_by_rejection(
                (logits / temperature).softmax(-1),
                (proposal.logits[:verify_len] / temperature).softmax(-1),
                drafts,
                noise,
                position + 1,
            )
        else:
            accept_len, token = verify_by_draw(logits, drafts, draw, position + 1)
        rollback(cache, position + 1 + accept_len)
        features = tap_features(states, drafter.target_layer_ids)[0]
        drafter.extend(features[: 1 + accept_len])
        result.verify_lens.append(verify_len)
        result.accept_lens.append(accept_len)
        for committed in [*drafts[:accept_len], token]:
            result.tokens.append(committed)
            if committed in stop_ids or len(result.tokens) == n:
                break
    return result


def sample_no_cache(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    prompt: Sequence[int],
    n: int,
    *,
    temperature: float,
    seed: int,
) -> list[int]:
    """Ordinary sampling of ``n`` tokens, the whole sequence run anew for each."""
    draw = _TargetDraw(Noise(seed), temperature)
    tokens = list(prompt)
    for _ in range(n):
        logits = forward(weights, cfg, torch.tensor([tokens]))
        tokens.append(draw(logits[0, -1], len(tokens)))
    return tokens[len(prompt) :]


def verify_by_draw(
    target_logits: Tensor,
    drafts: Sequence[int],
    draw: Callable[[Tensor, int], int],
    position: int,
) -> tuple[int, int]:
    """Accept drafts while they equal the target's own token; returns accepted and next token.

    ``target_logits [len(drafts) + 1, V]``; ``draw(logits, position)`` gives the target's token;
    ``position`` is that of the first draft.
    """
    for index, draft in enumerate(drafts):
        token = draw(target_logits[index], position + index)
        if token != draft:
            return index, token
    return len(drafts), draw(target_logits[len(drafts)], position + len(drafts))


def verify_by_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    drafts: Sequence[int],
    noise: Noise,
    position: int,
) -> tuple[int, int]:
    """Speculative rejection sampling; returns the number accepted and the token after them.

    ``target_probs [l + 1, V]`` and ``draft_probs [l, V]`` are the distributions that target and
    drafter really use, any truncation included. Draft x is accepted with probability
    ``min(1, p(x) / q(x))``; after the first rejection the token is drawn from ``max(p - q, 0)``,
    after none from p. ``position`` is that of the first draft.
    """
    for index, draft in enumerate(drafts):
        p, q = target_probs[index], draft_probs[index]
        if noise.uniform("accept", position + index) * q[draft] < p[draft]:
            continue
        residual = (p - q).clamp(min=0)
        if residual.sum() <= _MIN_RESIDUAL:
            residual = p
        return index, _draw_from(residual, noise, position + index)
    return len(drafts), _draw_from(target_probs[len(drafts)], noise, position + len(drafts))


@dataclass(frozen=True)
class _TargetDraw:
    """The target's own token at a position, by Gumbel noise keyed with the position."""

    noise: Noise
    temperature: float

    def __call__(self, logits: Tensor, position: int) -> int:
        return _draw(logits, self.temperature, self.noise, "token", position)


def _draft_choice(noise: Noise, temperature: float, method: str, anchor_position: int) -> Choose:
    """How drafts are drawn: with the target's noise when coupled, else with noise of their own.

    A discarded position is drafted again later, so independent draft noise is also keyed by the
    round's anchor: no outcome of an earlier round may be tied to the noise of a later one.
    """

    def choose(slot: int, logits: Tensor) -> int:
        position = anchor_position + 1 + slot
        if method == "coupled":
            return _draw(logits, temperature, noise, "token", position)
        return _draw(logits, temperature, noise, "draft", anchor_position, position)

    return choose


def _draw(logits: Tensor, temperature: float, noise: Noise, stream: str, *key: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int((logits / temperature + noise.gumbel(len(logits), stream, *key)).argmax())


def _draw_from(probs: Tensor, noise: Noise, position: int) -> int:
    return int((probs.log() + noise.gumbel(len(probs), "token", position)).argmax())
