"""`stacked_linear`: the interpreted kernel against the reference; parts of sums that leave nothing out."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.hyper.pallas_triton import default_tile as hyper_tile
from dspark_jax.kernels.linear import stacked_linear
from dspark_jax.kernels.linear.cases import FLASH, TEST_CASES, Case, make
from dspark_jax.kernels.linear.pallas_triton import (
    MANY_TOKENS,
    Tile,
    default_tile,
    stacked_linear_pallas,
)
from tests.parity.compare import FLOAT32_OP, Tolerance, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)
SUMS = Tolerance(2e-5, 1e-5, 1e-10)
"""float32 sums of 1024 terms in another order: the largest difference of 600 draws was 6e-6."""

ROUNDED = Tolerance(2e-2, 1e-2, 2e-5)
"""Results are rounded to bfloat16, and so is the expanded matrix of the reference."""


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: f"{case.storage}-{case.name}")
def test_against_reference(case: Case) -> None:
    plain = case.storage == "plain"
    arguments = make(case, fresh_seed(), jnp.float32 if plain else jnp.bfloat16)
    expected = stacked_linear(**arguments, dispatch=Dispatch())
    out = stacked_linear(**arguments, dispatch=INTERPRETED)
    assert out.dtype == arguments["x"].dtype
    assert_close(out, expected, FLOAT32_OP if plain else ROUNDED, case.name)


@pytest.mark.parametrize(
    ("storage", "depth"), [("plain", 64), ("fp8", 64), *(("fp4", d) for d in (64, 128, 256))]
)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("weights_first", [False, True])
def test_parts_of_the_sum(storage: str, depth: int, splits: int, weights_first: bool) -> None:
    """Beside fp4 a part begins within a word of scales or holds several."""
    case = Case("", 18, 32, 1024, storage)
    arguments = make(case, fresh_seed(), jnp.float32 if storage == "plain" else jnp.bfloat16)
    tile = Tile(16, 16, depth, splits=splits, warps=4, stages=1, weights_first=weights_first)
    out = stacked_linear_pallas(**arguments, dispatch=INTERPRETED, tile=tile)
    expected = stacked_linear(**arguments, dispatch=Dispatch())
    assert_close(out, expected, SUMS if storage == "plain" else ROUNDED)


def test_fp4_needs_whole_quarters() -> None:
    """Sixteen columns each: compiled, a shorter sum counts its terms twice (seen at 96 input columns)."""
    arguments = make(Case("", 4, 32, 96, "fp4"), fresh_seed(), jnp.bfloat16)
    with pytest.raises(ValueError, match="in multiples of 64"):
        stacked_linear(**arguments, dispatch=INTERPRETED)


@pytest.mark.parametrize("tokens", [*range(1, 130), 192, 224, 320, 640, 768, 1000, MANY_TOKENS - 1])
def test_splits_divide_the_steps(tokens: int) -> None:
    for outputs, inner, groups in FLASH.values():
        tile = default_tile(
            tokens=tokens, outputs=outputs * groups, inner=inner, bits=8, capability=90
        )
        assert inner // tile.depth % tile.splits == 0, dataclasses.astuple(tile)
    for inner in (4 * 4096, 4 * 7168, 4 * 256):
        mixing = hyper_tile(tokens=tokens, inner=inner, capability=90)
        assert inner // mixing.depth % mixing.splits == 0, dataclasses.astuple(mixing)
