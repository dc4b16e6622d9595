"""The margin of a model's closest choice."""

from __future__ import annotations

import torch

import torch_ref.moe
from benchmarks import near_ties
from benchmarks.near_ties import Choice, closest_choice
from dspark_jax.serving.config import ServeConfig


def test_the_margin_shrinks_to_nothing_when_two_experts_share_a_router_row(monkeypatch):
    folder = ServeConfig().model_folder
    tokens = [0, 5, 9, 300]
    plain = closest_choice(folder, tokens)
    assert plain.margin > 1e-6

    cfg, weights = near_ties.load_checkpoint(folder)
    gate = "layers.5.ffn.gate"
    scores: list[torch.Tensor] = []
    route = torch_ref.moe.route

    def listen(scope, cfg, x, token_ids):
        if scope.prefix == f"{gate}.":
            scores.append(
                torch.nn.functional.softplus(x @ scope["weight"].T).sqrt() + scope["bias"]
            )
        return route(scope, cfg, x, token_ids)

    monkeypatch.setattr(torch_ref.moe, "route", listen)
    near_ties.forward(weights, cfg, torch.tensor([tokens]))
    second, third = scores[0][0, -1].sort(descending=True).indices[1:3]
    twins = {**weights}
    for name in (f"{gate}.weight", f"{gate}.bias"):
        twins[name] = weights[name].clone()
        twins[name][third] = weights[name][second]
    monkeypatch.setattr(near_ties, "load_checkpoint", lambda folder: (cfg, twins))
    # Layer 0 routes by a table; layer 5 is the fifth that scores.
    assert closest_choice(folder, tokens) == Choice("experts", 4, 0.0)
