"""What is fixed when the programs of a step are compiled."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_jax.decode.verify import Method
from dspark_jax.kernels.dispatch import Dispatch


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is fixed when a step is compiled."""

    tokens: int  # T, flat tokens
    logit_rows: int  # C, tokens whose logits are computed
    method: Method
    dispatch: Dispatch
