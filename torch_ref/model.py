"""The DeepSeek-V4 trunk: token ids to logits, whole sequence, no cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torch_ref.attention import attention
from torch_ref.config import TorchRefConfig
from torch_ref.layers import (
    collapse_streams,
    merge_streams,
    mixing_weights,
    rms_norm,
    update_streams,
)
from torch_ref.moe import mixture
from torch_ref.quantization import Simulation
from torch_ref.scope import Scope


@torch.no_grad()
def forward(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    token_ids: Tensor,
    *,
    simulate_quantization: bool | Simulation = False,
) -> Tensor:
    """Logits ``[B, S, V]`` float32 for ``token_ids`` int ``[B, S]`` at positions 0 ... S-1."""
    return forward_with_states(
        weights, cfg, token_ids, simulate_quantization=simulate_quantization
    )[0]


@torch.no_grad()
def forward_with_states(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    token_ids: Tensor,
    *,
    simulate_quantization: bool | Simulation = False,
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`forward`, and the residual streams ``[B, S, N, C]``.

    The list holds the embedded tokens first and then the output of every layer, so layer ``i``
    is at ``i + 1``; :func:`tap_features` reads it.
    """
    scope = Scope(weights, simulation=Simulation.resolve(simulate_quantization))
    positions = torch.arange(token_ids.shape[1])

    def attend(attn: Scope, layer: int, x: Tensor) -> Tensor:
        return attention(attn, cfg, layer, x, positions)

    return run_layers(scope, cfg, token_ids, attend)


def run_layers(
    scope: Scope,
    cfg: TorchRefConfig,
    token_ids: Tensor,
    attend: Callable[[Scope, int, Tensor], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers with ``attend(scope, layer, x)`` as their attention; logits and states."""
    states = [embed(scope, cfg, token_ids)]
    for layer in range(cfg.num_hidden_layers):
        below = scope.at(f"layers.{layer}")
        table_ids = token_ids if layer < cfg.num_hash_layers else None
        states.append(
            run_block(below, cfg, states[-1], lambda s, x, i=layer: attend(s, i, x), table_ids)
        )
    hidden = rms_norm(
        collapse_streams(scope, cfg, states[-1]), scope["norm.weight"], cfg.rms_norm_eps
    )
    return scope.linear("head", hidden), states


def embed(scope: Scope, cfg: TorchRefConfig, token_ids: Tensor) -> Tensor:
    """Embed ``token_ids [B, S]`` and copy to every stream: ``[B, S, N, C]``."""
    embedded = scope["embed.weight"][token_ids]
    return embedded[:, :, None].expand(-1, -1, cfg.hc_mult, -1)


def run_block(
    scope: Scope,
    cfg: TorchRefConfig,
    streams: Tensor,
    attend: Callable[[Scope, Tensor], Tensor],
    table_ids: Tensor | None,
) -> Tensor:
    """One transformer block on ``streams [B, S, N, C]``: attention, then experts.

    ``attend(scope, x)`` maps the normed input to the attention output; ``table_ids`` are the
    token ids of a layer that routes by its table, otherwise None.
    """
    pre, post, comb = mixing_weights(scope, "hc_attn", cfg, streams)
    x = rms_norm(merge_streams(pre, streams), scope["attn_norm.weight"], cfg.rms_norm_eps)
    streams = update_streams(post, comb, attend(scope.at("attn"), x), streams)
    pre, post, comb = mixing_weights(scope, "hc_ffn", cfg, streams)
    x = rms_norm(merge_streams(pre, streams), scope["ffn_norm.weight"], cfg.rms_norm_eps)
    return update_streams(post, comb, mixture(scope.at("ffn"), cfg, x, table_ids), streams)


def tap_features(states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Drafter features: mean over streams of the output of each layer, ``[B, S, m * C]``.

    ``states`` comes from :func:`forward_with_states`; layer -1 is the embedded input.
    """
    return torch.cat([states[layer + 1].mean(dim=2) for layer in layers], dim=-1)
