"""The DSpark drafter of DeepSeek-V4 checkpoints, stages ``mtp.0 ...``.

Context: the trunk's features of a committed token, projected once and stored by every stage as
one key row at the token's own position, in a ring of ``sliding_window`` rows. Block: the anchor
(last committed token, which has no context row) and noise tokens, at the anchor's position and
after, each seeing the same context rows and the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_ref.attention import attend, project_output, project_queries, project_rows
from torch_ref.config import TorchRefConfig
from torch_ref.heads import Choose, Proposal, choose_greedy, confidences, sample_sequentially
from torch_ref.layers import collapse_streams, inverse_frequencies, rms_norm
from torch_ref.model import embed, run_block
from torch_ref.quantization import Simulation
from torch_ref.scope import Scope


def context_rows(scope: Scope, cfg: TorchRefConfig, features: Tensor, positions: Tensor) -> Tensor:
    """Context key rows ``[stages, T, D]`` of tokens at ``positions`` int ``[T]``.

    ``features [T, m * C]`` come from :func:`torch_ref.model.tap_features`. Projected features go
    straight into each stage's key projection; no norm of the stage is applied.
    """
    first = scope.at("mtp.0")
    context = first.quantized_linear("main_proj", features)
    context = rms_norm(context, first["main_norm.weight"], cfg.rms_norm_eps)[None]
    frequencies = inverse_frequencies(cfg, compressed=False)
    return torch.cat(
        [
            project_rows(scope.at(f"mtp.{stage}.attn"), cfg, context, positions, frequencies)
            for stage in range(cfg.dspark_num_stages)
        ]
    )


def draft_block(
    scope: Scope, cfg: TorchRefConfig, context: Tensor, anchor: int, position: int
) -> Tensor:
    """Hidden states ``[G, C]`` of a draft block, streams collapsed, before the final norm.

    ``context [stages, W', D]`` holds the visible context rows; every block slot sees all of them
    and all block slots. ``anchor`` is the token at ``position``, which is slot 0.
    """
    slots = cfg.dspark_block_size
    token_ids = torch.full((1, slots), cfg.dspark_noise_token_id)
    token_ids[0, 0] = anchor
    positions = torch.arange(position, position + slots)
    frequencies = inverse_frequencies(cfg, compressed=False)
    visible = torch.ones(1, slots, context.shape[1] + slots, dtype=torch.bool)
    streams = embed(scope, cfg, token_ids)
    for stage in range(cfg.dspark_num_stages):

        def attend_block(attn: Scope, x: Tensor, rows: Tensor = context[stage]) -> Tensor:
            _, queries = project_queries(attn, cfg, x, positions, frequencies)
            block = project_rows(attn, cfg, x, positions, frequencies)
            keys = torch.cat([rows[None], block], dim=1)
            attended = attend(attn, cfg, queries, keys, visible)
            return project_output(attn, cfg, attended, positions, frequencies)

        streams = run_block(scope.at(f"mtp.{stage}"), cfg, streams, attend_block, None)
    return collapse_streams(scope.at(f"mtp.{cfg.dspark_num_stages - 1}"), cfg, streams)[0]


class DSparkDrafter:
    """Drafter of one request: the context of its committed tokens, and proposals after them."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        cfg: TorchRefConfig,
        *,
        simulate_quantization: bool | Simulation = False,
    ) -> None:
        """Start without context. Raises ``ValueError`` if the model has no drafter."""
        if not cfg.dspark_num_stages:
            raise ValueError("this checkpoint has no DSpark stages")
        self._scope = Scope(weights, simulation=Simulation.resolve(simulate_quantization))
        self._cfg = cfg
        self._ring = torch.full(
            (cfg.dspark_num_stages, cfg.sliding_window, cfg.head_dim), torch.nan
        )
        self.length = 0
        self.draft_len = cfg.dspark_block_size
        self.target_layer_ids = cfg.dspark_target_layer_ids

    @torch.no_grad()
    def extend(self, features: Tensor) -> None:
        """Append the features ``[T, m * C]`` of the next T committed tokens."""
        window = len(self._ring[0])
        positions = torch.arange(self.length, self.length + len(features))
        self.length += len(features)
        positions, features = positions[-window:], features[-window:]
        rows = context_rows(self._scope, self._cfg, features, positions)
        self._ring[:, positions % window] = rows

    def visible_context(self) -> Tensor:
        """Context rows ``[stages, min(window, length), D]`` that the next block sees, by age."""
        window = len(self._ring[0])
        positions = torch.arange(max(0, self.length - window), self.length)
        return self._ring[:, positions % window]

    @torch.no_grad()
    def propose(self, anchor: int, choose: Choose = choose_greedy) -> Proposal:
        """Draft after ``anchor``, the token at position ``length``, choosing slot by slot."""
        scope, cfg = self._scope, self._cfg
        hidden = draft_block(scope, cfg, self.visible_context(), anchor, self.length)
        last = scope.at(f"mtp.{cfg.dspark_num_stages - 1}")
        normed = rms_norm(hidden, last["norm.weight"], cfg.rms_norm_eps)
        base_logits = scope.linear("head", normed)
        tokens, logits = sample_sequentially(
            last.at("markov_head"), "vanilla", base_logits, hidden, anchor, choose
        )
        return Proposal(tokens, logits, confidences(last, hidden, anchor, tokens))
