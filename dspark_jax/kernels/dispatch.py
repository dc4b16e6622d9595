"""Which implementation of an operation runs. The choice is made once, by the caller, and is static."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax


class Backend(enum.Enum):
    """`REFERENCE` is plain jnp and runs anywhere; `PALLAS` is the Triton lowering for NVIDIA GPUs."""

    REFERENCE = "reference"
    PALLAS = "pallas"


@dataclass(frozen=True)
class Dispatch:
    """Static argument of every operation.

    `interpret` runs Pallas kernels on a CPU host, slowly, for tests. `capability` is the compute capability of
    the GPU that will run them, times ten (90: H100 and H200, 100: B200, 103: B300); only tile sizes depend on it.
    """

    backend: Backend = Backend.REFERENCE
    interpret: bool = False
    capability: int = 90


def default_dispatch() -> Dispatch:
    """Pallas on a GPU, the reference elsewhere. Looks at the devices: call it at start, not at import."""
    if jax.default_backend() != "gpu":
        return Dispatch()
    capability = str(jax.devices()[0].compute_capability)  # "9.0", "10.3"
    return Dispatch(Backend.PALLAS, capability=int(capability.replace(".", "")))
