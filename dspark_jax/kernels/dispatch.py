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
    """Static argument of every operation. `interpret` runs Pallas kernels on a CPU host, slowly, for tests."""

    backend: Backend = Backend.REFERENCE
    interpret: bool = False


def default_dispatch() -> Dispatch:
    """Pallas on a GPU, the reference elsewhere. Looks at the devices: call it at start, not at import."""
    on_gpu = jax.default_backend() == "gpu"
    return Dispatch(Backend.PALLAS if on_gpu else Backend.REFERENCE)
