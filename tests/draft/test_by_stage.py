"""Experts of a drafter, split where kernels do not reach a whole stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.checkpoint.dummy import abstract_params
from dspark_jax.draft.params import draft_by_stage
from dspark_jax.kernels.quantized import SplitStack
from dspark_jax.kernels.weight_tile import is_reachable
from tests.kernels.flash import FLASH, released


def test_of_flash_only_the_down_projection_is_split():
    _, draft = abstract_params(released(FLASH), dtype=jnp.bfloat16, keep_quantized=True)
    assert draft is not None
    whole = draft.stages
    split = draft_by_stage(draft).stages
    assert split.w_gate_up is whole.w_gate_up  # 6 GiB: beyond 4, offsets have 64 bits
    assert isinstance(split.w_down, SplitStack)
    assert split.w_down.shape == whole.w_down.shape == (3, 256, 4096, 2048)
    assert all(is_reachable(part) for part in split.w_down.parts)
    assert sum(leaf.size for leaf in jax.tree.leaves(split)) == sum(
        leaf.size for leaf in jax.tree.leaves(whole)
    )
