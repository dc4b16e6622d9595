"""Compilation to machine code for a GPU that is not there, through a topology described in text.

Needs the CUDA plugin of JAX, which the machines with an NVIDIA GPU have. The assembler checks registers and shared
memory; nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

GPUS = {90: ("NVIDIA H200", 132), 100: ("NVIDIA B200", 148), 103: ("NVIDIA B300", 148)}
"""Compute capability times ten -> name and multiprocessors."""

# The fields that XLA's protocol buffer GpuTargetConfigProto must have for these three.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@cache
def _placement(capability: int) -> NamedSharding:
    name, cores = GPUS[capability]
    major, minor = divmod(capability, 10)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=_TARGET.format(name=name, cores=cores, major=major, minor=minor),
        topology="1x1x1",
    )
    return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())


def compile_for(
    capability: int, function: Callable[..., Any], *arguments: Any, **options: Any
) -> jax.stages.Compiled:
    """`function` compiled for arguments whose leaves are arrays or abstract arrays; `options` go to `jax.jit`."""
    name, cores = GPUS[capability]
    # Where no GPU is present, Pallas asks this mesh what it lowers for.
    device = AbstractDevice(device_kind=name, num_cores=cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_placement(capability)), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function, **options).lower(*placed).compile()
