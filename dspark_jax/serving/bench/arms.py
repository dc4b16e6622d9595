"""The ways of running the server that a sweep compares."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark_jax.serving.flag_error import FlagError


@dataclass(frozen=True)
class Arm:
    """One way to run the server; without a `speculative_config` it decodes ordinarily."""

    name: str
    speculative_config: Mapping[str, Any] | None


def make_arms(base: Mapping[str, Any], names: tuple[str, ...] = ()) -> list[Arm]:
    """The arms `none`, `fixed-1` ... `fixed-k` and `adaptive`, or those of them that are named.

    A fixed arm below k still drafts k tokens and verifies the first n: the drafter was trained for
    blocks of k, and a shorter block is another model.

    Args:
        base: speculative config shared by the arms; gives k as `num_speculative_tokens`.
        names: which arms, in this order; all if empty.

    Raises:
        FlagError: an unknown name, or no k.
    """
    k = base.get("num_speculative_tokens")
    if not isinstance(k, int) or k < 1:
        raise FlagError(f'--speculative-config: "num_speculative_tokens" must be >= 1, got {k!r}')
    full = {**base, "enable_adaptive_verification": False}
    arms = [
        Arm("none", None),
        *(Arm(f"fixed-{n}", {**full, "fixed_verify_len": n}) for n in range(1, k)),
        Arm(f"fixed-{k}", full),
        Arm("adaptive", {**base, "enable_adaptive_verification": True}),
    ]
    by_name = {arm.name: arm for arm in arms}
    if unknown := [name for name in names if name not in by_name]:
        raise FlagError(f"--arms: {unknown} not among {list(by_name)}")
    return [by_name[name] for name in names] if names else arms


def fixed_len(name: str) -> int | None:
    """n of `fixed-n`, None for other arms."""
    match = re.fullmatch(r"fixed-(\d+)", name)
    return int(match[1]) if match else None


def arm_rank(name: str) -> tuple[int, int, str]:
    """Sort key: none, fixed arms by length, adaptive, anything else."""
    kind = 1 if fixed_len(name) else {"none": 0, "adaptive": 2}.get(name, 3)
    return kind, fixed_len(name) or 0, name
