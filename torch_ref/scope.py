"""A view of the flat weight dictionary below one name prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_ref.quantization import ACTIVATION_BLOCK, Simulation, round_bfloat16, round_e4m3


@dataclass(frozen=True)
class Scope:
    """Weights whose published names start with ``prefix``, and the rounding in force."""

    weights: Mapping[str, Tensor]
    prefix: str = ""
    simulation: Simulation = field(default_factory=Simulation)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def at(self, name: str) -> Scope:
        """Descend to the names that start with ``name.``."""
        return Scope(self.weights, f"{self.prefix}{name}.", self.simulation)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply ``name.weight [out, in]`` to ``x [..., in]``, a plain float32 product."""
        return torch.nn.functional.linear(x, self[f"{name}.weight"])

    def quantized_linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear that released files store in fp8 or fp4, rounding where simulated."""
        if not self.simulation.linear_activations:
            return self.linear(name, x)
        return round_bfloat16(self.linear(name, round_e4m3(x, ACTIVATION_BLOCK)))
