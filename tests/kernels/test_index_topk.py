"""`index_topk`: the interpreted kernels against the reference, ties and long rows included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.index_topk import index_topk
from dspark_jax.kernels.index_topk.cases import TEST_CASES, Case, make
from dspark_jax.kernels.index_topk.pallas_triton import index_topk_pallas, select
from dspark_jax.kernels.rows import RowFormat, decode
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)
CASES = {case.name: case for case in TEST_CASES}


def check(case: Case, row_format: RowFormat = RowFormat.PLAIN, **sizes: int) -> None:
    arguments = make(case, fresh_seed(), jnp.float32, row_format=row_format)
    expected, expected_counts = index_topk(**arguments, dispatch=Dispatch())
    places, counts = index_topk_pallas(**arguments, dispatch=INTERPRETED, **sizes)
    np.testing.assert_array_equal(counts, expected_counts)
    for row, wanted, count in zip(np.asarray(places), np.asarray(expected), np.asarray(counts)):
        np.testing.assert_array_equal(np.sort(row[:count]), np.sort(wanted[:count]))
        assert (row[count:] == 0).all()


@pytest.mark.parametrize("row_format", [RowFormat.PLAIN, RowFormat.FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
def test_against_reference(case: Case, row_format: RowFormat) -> None:
    check(case, row_format)


def test_fp8_keys_are_chosen_as_the_numbers_that_they_hold() -> None:
    arguments = make(CASES["mixed_lengths"], fresh_seed(), jnp.float32, row_format=RowFormat.FP8)
    numbers = arguments | {"index_keys": decode(arguments["index_keys"])}
    results = [index_topk(**tree, dispatch=Dispatch()) for tree in (arguments, numbers)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_fp8_keys_beside_bfloat16_queries() -> None:
    """Whole numbers: their scores are exact in float16 too."""
    arguments = make(CASES["ties"], fresh_seed(), jnp.bfloat16, row_format=RowFormat.FP8)
    (places, counts), (expected, _) = (
        index_topk(**arguments, dispatch=dispatch) for dispatch in (INTERPRETED, Dispatch())
    )
    for row, wanted, count in zip(np.asarray(places), np.asarray(expected), np.asarray(counts)):
        np.testing.assert_array_equal(np.sort(row[:count]), np.sort(wanted[:count]))


@pytest.mark.parametrize("name", ["mixed_lengths", "ties"])
def test_rows_in_chunks_and_tokens_in_turns(name: str) -> None:
    entries = CASES[name].max_pages * CASES[name].per_page
    check(CASES[name], most=8, budget_bytes=4 * entries * 6)


def test_selection_takes_ties_from_the_front_and_orders_signs_and_infinities() -> None:
    scores = np.zeros((2, 16), np.float32)
    scores[0] = [-1, -0.5, -np.inf, 2, 2, 2, 0, -2, -1, 2, -3, -1, -4, -5, -6, np.nan]
    scores[1] = np.nan
    counts = jnp.asarray([15, 3])
    places = select(
        jnp.asarray(scores),
        counts,
        k=7,
        page_table=jnp.zeros((1, 1), jnp.int32),
        slots=jnp.zeros(2, jnp.int32),
        per_page=16,
        dispatch=INTERPRETED,
    )
    assert np.asarray(places[0]).tolist() == [0, 1, 3, 4, 5, 6, 9]
    assert np.asarray(places[1]).tolist() == [0, 1, 2, 0, 0, 0, 0]
