"""`finish_rows` and `store_rows`: the interpreted kernel against the reference, and rounding bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch, default_dispatch
from dspark_jax.kernels.latent_rows import finish_rows, store_rows
from dspark_jax.kernels.latent_rows.cases import (
    TEST_CASES,
    Case,
    make,
    make_exact,
    make_stored,
)
from dspark_jax.kernels.rows import RowFormat, as_stored, decode, empty_keys, empty_rows, encode
from tests.kernels.test_rows import rows_of_every_size
from tests.parity.compare import BFLOAT16_OP, FLOAT32_OP, Tolerance, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)
cases = pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
stored_formats = pytest.mark.parametrize(
    ("row_format", "is_keys"),
    [*((row_format, False) for row_format in RowFormat), (RowFormat.FP8, True)],
    ids=["plain", "rounded", "fp8", "keys"],
)


def assert_rounded_alike(actual: Any, expected: Any) -> None:
    """Equal but for a few values that lie beside an edge between two codes."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=0.15, atol=1e-2)
    assert (actual != expected)[np.isfinite(expected)].mean() < 0.02


def check(actual: Any, expected: Any, row_format: RowFormat, tolerance: Tolerance) -> None:
    if row_format is RowFormat.PLAIN:
        assert_close(actual, expected, tolerance)
    else:
        assert_rounded_alike(actual, expected)


@cases
@pytest.mark.parametrize("row_format", [RowFormat.PLAIN, RowFormat.FP8], ids=["plain", "fp8"])
def test_finished_rows(case: Case, row_format: RowFormat) -> None:
    arguments = make(case, fresh_seed(), jnp.float32)
    like = empty_rows((), case.width, row_format, num_rotary=case.rotary, dtype=jnp.float32)
    out = finish_rows(**arguments, like=like, dispatch=INTERPRETED)
    expected = finish_rows(**arguments, like=like, dispatch=Dispatch())
    assert out.dtype == jnp.float32
    check(out, expected, row_format, FLOAT32_OP)
    # What is read back from a cache is what the step itself has read.
    np.testing.assert_array_equal(as_stored(out, like), out)


@cases
@stored_formats
def test_stored_rows(case: Case, row_format: RowFormat, is_keys: bool) -> None:
    """Places of other rows, and of rows without a page, keep what they held: NaN."""
    if case.width == case.rotary and row_format is RowFormat.FP8 and not is_keys:
        pytest.skip("kernels take no array without elements")
    arguments = make_stored(case, fresh_seed(), jnp.float32, row_format, is_keys=is_keys)
    pool = store_rows(**arguments, dispatch=INTERPRETED)
    expected = store_rows(**arguments, dispatch=Dispatch())
    assert jax.tree.structure(pool) == jax.tree.structure(expected)
    check(decode(pool), decode(expected), row_format, FLOAT32_OP)
    before = arguments["pool"]
    places = np.zeros(pool.shape[:3], bool)
    page, offset = np.asarray(arguments["page"]), np.asarray(arguments["offset"])
    kept = page < pool.shape[1]
    places[1, page[kept], offset[kept]] = True
    assert places.sum() == kept.sum()
    for new, old in zip(jax.tree.leaves(pool), jax.tree.leaves(before)):
        new, old = (np.asarray(x)[~places].view(np.uint8) for x in (new, old))
        np.testing.assert_array_equal(new, old)


@stored_formats
def test_bfloat16(row_format: RowFormat, is_keys: bool) -> None:
    case = Case("", 7, 96, 16)
    arguments = make_stored(case, fresh_seed(), jnp.bfloat16, row_format, is_keys=is_keys)
    pool = store_rows(**arguments, dispatch=INTERPRETED)
    expected = store_rows(**arguments, dispatch=Dispatch())
    check(*(decode(x).astype(jnp.float32) for x in (pool, expected)), row_format, BFLOAT16_OP)
    arguments = make(case, fresh_seed(), jnp.bfloat16)
    like = empty_rows((), 96, row_format, num_rotary=16, dtype=jnp.bfloat16)
    out = finish_rows(**arguments, like=like, dispatch=INTERPRETED)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(as_stored(out, like), out)


def rows_of_ties(width: int) -> np.ndarray:
    """Rows in blocks of scale one whose values lie half-way between two codes of e4m3, subnormal ones too."""
    rng = np.random.default_rng(fresh_seed())
    codes = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    rows = rng.choice(np.concatenate([middles, -middles]), (50, width))
    rows[:, ::64] = 448
    return rows


def check_rounding(width: int, rotary: int, dispatch: Dispatch) -> None:
    """Raise unless rows of every size are rounded and stored bit for bit as `encode` has them."""
    every = rows_of_every_size(width)
    rows = np.concatenate([every[:200], every[200::16], rows_of_ties(width)])
    rows = rows[np.abs(rows).max(axis=1) < 2.0**44]
    count = len(rows)
    arrays = make_exact(rows, rotary, jnp.float32)
    fixed = {"eps": arrays.pop("eps"), "dispatch": dispatch}
    places = {"page": jnp.arange(count), "offset": jnp.zeros(count, jnp.int32)}
    lead = (1, count, 1)
    for row_format in RowFormat:
        pool = empty_rows(lead, width, row_format, num_rotary=rotary, dtype=jnp.float32)
        out = jax.jit(partial(finish_rows, **fixed))(like=pool, **arrays)
        np.testing.assert_array_equal(out, as_stored(jnp.asarray(rows), pool))
        for empty in (pool, empty_keys(lead, width, row_format, dtype=jnp.float32)):
            stored = jax.jit(partial(store_rows, **fixed))(pool=empty, **arrays, **places)
            expected = encode(jnp.asarray(rows)[None, :, None], empty)
            for new, old in zip(jax.tree.leaves(stored), jax.tree.leaves(expected)):
                new, old = (np.asarray(x).view(np.uint8) for x in (new, old))
                np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(
    ("width", "rotary"), [pytest.param(512, 64, marks=pytest.mark.slow), (200, 40)]
)
def test_rounding_is_that_of_stored_rows(width: int, rotary: int) -> None:
    check_rounding(width, rotary, INTERPRETED)


@pytest.mark.gpu
def test_rounding_is_that_of_stored_rows_on_a_gpu() -> None:
    check_rounding(512, 64, default_dispatch())
    check_rounding(128, 64, default_dispatch())


def test_a_row_that_is_not_finite_stays_so() -> None:
    """And stays alone."""
    arguments = make_stored(Case("", 4, 80, 16), fresh_seed(), jnp.float32, RowFormat.FP8)
    arguments["page"] = jnp.asarray([3, 0, 2, 8])
    clean = decode(store_rows(**arguments, dispatch=INTERPRETED))
    for bad in (np.nan, np.inf):
        raw = arguments["raw"].at[2, 5].set(bad)
        out = decode(store_rows(**arguments | {"raw": raw}, dispatch=INTERPRETED))
        place = (1, 2, int(arguments["offset"][2]))
        assert np.isnan(out[place][5])
        np.testing.assert_array_equal(out.at[place].set(0), clean.at[place].set(0))
