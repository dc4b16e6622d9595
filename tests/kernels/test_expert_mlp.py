"""`expert_mlp`: sorting, tiles and grouped products, interpreted, against the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.expert_mlp import expert_mlp
from dspark_jax.kernels.expert_mlp.cases import TEST_CASES, Case, make
from dspark_jax.kernels.expert_mlp.plan import make_plan
from dspark_jax.kernels.quantized import pack_fp4_scale, unpack_fp4_scale
from tests.parity.compare import FLOAT32_OP, Tolerance, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)
FLOAT16_OPERANDS = Tolerance(1e-2, 3e-3, 1e-6)
"""Activations are rounded to float16, and products of opposite sign cancel: single elements may be off by a few
thousandths (4e-3 was seen in hundreds of draws), the direction of a row never."""


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: f"{case.storage}-{case.name}")
def test_against_reference(case: Case) -> None:
    plain = case.storage == "plain"
    arguments = make(case, fresh_seed(), jnp.float32 if plain else jnp.bfloat16)
    # The reference multiplies padding by zero, so its rows must be numbers there.
    clean = arguments | {"x": jnp.nan_to_num(arguments["x"])}
    expected = expert_mlp(**clean, dispatch=Dispatch())
    out = expert_mlp(**arguments, dispatch=INTERPRETED)
    assert_close(out, expected, FLOAT32_OP if plain else FLOAT16_OPERANDS, case.name)


def test_rows_beyond_float16_are_its_largest_number() -> None:
    """Single experts' rows are written in float16 beside bfloat16 activations."""
    case = next(case for case in TEST_CASES if case.storage == "plain")
    arguments = make(case, fresh_seed(), jnp.bfloat16)
    # One column only: sums that nearly cancel would be as uncertain as their terms are large.
    w_down = jnp.zeros_like(arguments["w_down"]).at[..., 0].set(2.0**40)
    arguments |= {"x": jnp.nan_to_num(arguments["x"]), "w_down": w_down}
    most = float(jnp.finfo(jnp.float16).max)
    expected = jnp.zeros(arguments["x"].shape)
    for j in range(arguments["expert_ids"].shape[1]):
        one = {name: arguments[name][:, j : j + 1] for name in ("expert_ids", "weights")}
        row = expert_mlp(**arguments | one, dispatch=Dispatch())
        assert (jnp.abs(row) > 2 * most).all()
        expected += jnp.clip(row, -most, most)
    out = expert_mlp(**arguments, dispatch=INTERPRETED)
    assert_close(out, expected, FLOAT16_OPERANDS)


@pytest.mark.parametrize("rows", [2, 16])
def test_plan_sorts_stably_and_covers_every_assignment_once(rows: int) -> None:
    experts = 5
    rng = np.random.default_rng(fresh_seed())
    ids = rng.integers(0, experts + 1, (9, 3)).astype(np.int32)  # 5 is padding
    plan = make_plan(jnp.asarray(ids), experts=experts, rows=rows, dispatch=INTERPRETED)
    flat = ids.reshape(-1)
    real = int((flat < experts).sum())
    np.testing.assert_array_equal(
        np.asarray(plan.order)[:real], np.argsort(flat, kind="stable")[:real]
    )
    covered: list[int] = []
    for expert, begin, count in zip(*(np.asarray(x) for x in plan[1:])):
        assert count <= rows
        places = range(begin, begin + count)
        assert all(flat[plan.order[place]] == expert for place in places)
        covered += places
    assert sorted(covered) == list(range(real))


@pytest.mark.parametrize("runs", [1, 3, 4, 9])
def test_scale_words_round_trip(runs: int) -> None:
    exponents = np.random.default_rng(fresh_seed()).integers(0, 255, (2, 6, runs), dtype=np.uint8)
    for array in (exponents, jnp.asarray(exponents)):
        words = pack_fp4_scale(array)
        assert words.shape == (2, -(-runs // 4), 6)
        assert words.dtype == np.int32
        np.testing.assert_array_equal(unpack_fp4_scale(words, 32 * runs), exponents)
