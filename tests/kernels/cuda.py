"""Lowering for CUDA on any host: whatever Triton cannot express fails here, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def lower_for_cuda(function: Callable[..., Any], *arguments: Any) -> str:
    """StableHLO of `function` with its kernels lowered for an H200. Arguments may be abstract."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_kernels(text: str) -> int:
    """How many Triton kernels a lowered program calls."""
    return text.count("__gpu$xla.gpu.triton")
