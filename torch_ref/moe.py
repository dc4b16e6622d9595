"""Routed and shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ref.config import TorchRefConfig
from torch_ref.layers import largest_first, swiglu
from torch_ref.scope import Scope


def route(
    gate: Scope, cfg: TorchRefConfig, x: Tensor, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose experts for ``x [B, S, C]``; returns ids and weights, both ``[B, S, k]``.

    With ``token_ids [B, S]`` the choice is the layer's table of token ids; without, the largest
    scores after adding the selection bias. The weights come from the unbiased scores either way.
    """
    scores = torch.nn.functional.softplus(x @ gate["weight"].T).sqrt()
    if token_ids is not None:
        chosen = gate["tid2eid"][token_ids]
    else:
        chosen = largest_first(scores + gate["bias"], cfg.num_experts_per_tok)
    weights = scores.gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
    return chosen, weights


def mixture(scope: Scope, cfg: TorchRefConfig, x: Tensor, token_ids: Tensor | None) -> Tensor:
    """Apply the expert block ``ffn`` to normed ``x [B, S, C]``; see :func:`route`."""
    chosen, weights = route(scope.at("gate"), cfg, x, token_ids)
    output = swiglu(scope.at("shared_experts"), x, cfg.swiglu_limit)
    for expert in chosen.unique().tolist():
        batch, step, rank = torch.where(chosen == expert)
        row_weight = weights[batch, step, rank, None]
        routed = swiglu(scope.at(f"experts.{expert}"), x[batch, step], cfg.swiglu_limit, row_weight)
        output = output.index_put((batch, step), routed, accumulate=True)
    return output
