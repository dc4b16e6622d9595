"""Stored rows and keys: what rounding gives, bit for bit, and that it gives it once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dspark_jax.kernels.rows import (
    Fp8Keys,
    Fp8Rows,
    RoundedRows,
    RowFormat,
    as_stored,
    by_place,
    decode,
    dequantize_rows,
    empty_keys,
    empty_rows,
    encode,
    gather,
    quantize_keys,
    quantize_rows,
    scatter,
)
from tests.seeds import fresh_seed
from torch_ref.quantization import E4M3_MAX, round_cache_row, round_e4m3

FORMATS = list(RowFormat)


def rows_of_every_size(width: int) -> np.ndarray:
    """Random rows from 1e-13 to 1e13, zeros, and blocks whose largest value lies on or beside a scale's edge."""
    rng = np.random.default_rng(fresh_seed())
    rows = rng.standard_normal((4000, width)).astype(np.float32)
    rows *= np.exp(rng.uniform(-30, 30, (4000, 1))).astype(np.float32)
    rows[:3] = 0
    edges = np.float32([E4M3_MAX * 2.0**e for e in range(-24, 100, 4)] + [1e-4, 224.5])
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.inf)])
    rows[3 : 3 + len(near)] = near[:, None] * rng.uniform(-1, 1, (len(near), width))
    rows[3 : 3 + len(near), ::16] = near[:, None]
    return rows


def check_rounding(width: int, rotary: int) -> None:
    rows = rows_of_every_size(width)
    expected = round_cache_row(torch.from_numpy(rows), rotary).numpy()
    stored = jax.jit(quantize_rows, static_argnums=1)(rows, rotary)
    np.testing.assert_array_equal(jax.jit(dequantize_rows)(stored), expected)
    # In one program, where XLA sees conversions there and back.
    like = empty_rows((), width, RowFormat.ROUNDED, num_rotary=rotary, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(as_stored)(rows, like), expected)
    keys = jax.jit(quantize_keys)(rows)
    np.testing.assert_array_equal(
        jax.jit(decode)(keys), round_e4m3(torch.from_numpy(rows), width).numpy()
    )


@pytest.mark.parametrize(("width", "rotary"), [(512, 64), (32, 8), (200, 40), (64, 32)])
def test_rounding_equals_the_reference(width: int, rotary: int) -> None:
    check_rounding(width, rotary)


@pytest.mark.gpu
def test_rounding_equals_the_reference_on_a_gpu() -> None:
    check_rounding(512, 64)


@given(
    arrays.arrays(
        np.float32,
        (3, 80),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    )
)
def test_rounding_again_changes_nothing(rows: np.ndarray) -> None:
    """In bfloat16 too, which is how a step hands rows around."""
    once = dequantize_rows(quantize_rows(jnp.asarray(rows), 8))
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(once, 8)), once)
    half = once.astype(jnp.bfloat16)
    np.testing.assert_array_equal(half.astype(jnp.float32), once)
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(half, 8)), once)


def test_layout() -> None:
    """Seven scales of a released row in two words, the first block's in the lowest byte of the first."""
    row = np.repeat(np.float32(448) * 2.0 ** np.arange(8), 64)
    stored = quantize_rows(jnp.asarray(row, jnp.float32), 64)
    assert stored.shape == (512,)
    assert (stored.codes.dtype, stored.codes.shape) == (jnp.float8_e4m3fn, (448,))
    assert (stored.rotary.dtype, stored.rotary.shape) == (jnp.bfloat16, (64,))
    words = [127 | 128 << 8 | 129 << 16 | 130 << 24, 131 | 132 << 8 | 133 << 16]
    np.testing.assert_array_equal(stored.scales, np.uint32(words).view(np.int32))
    assert stored.codes.nbytes + stored.rotary.nbytes + stored.scales.nbytes == 584
    key = quantize_keys(jnp.full(128, 3.0))
    assert (key.shape, float(key.scale), key.codes.nbytes) == ((128,), 2.0**-7, 128)


@pytest.mark.parametrize("row_format", FORMATS, ids=lambda kind: kind.value)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_written_is_read(row_format: RowFormat, dtype: Any) -> None:
    """Also where the places of a scatter lie beyond the end, and by place instead of page."""
    rng = np.random.default_rng(fresh_seed())
    pool = empty_rows((2, 5, 3), 72, row_format, num_rotary=16, dtype=dtype, fill=np.nan)
    kind = {RowFormat.PLAIN: jax.Array, RowFormat.ROUNDED: RoundedRows, RowFormat.FP8: Fp8Rows}
    assert isinstance(pool, kind[row_format])
    assert pool.shape == (2, 5, 3, 72)
    assert np.isnan(decode(pool).astype(jnp.float32)).all()
    new = jnp.asarray(rng.standard_normal((4, 72)), dtype)
    page, offset = jnp.asarray([4, 0, 5, 2]), jnp.asarray([1, 2, 0, 0])
    pool = jax.jit(scatter)(pool, (1, page, offset), new)
    expected = np.full((2, 5, 3, 72), np.nan, np.float32)
    kept = np.array([0, 1, 3])
    stored = as_stored(new, pool)
    assert stored.dtype == dtype
    expected[1, np.asarray(page)[kept], np.asarray(offset)[kept]] = np.asarray(stored, np.float32)[
        kept
    ]
    np.testing.assert_array_equal(decode(pool).astype(jnp.float32), expected)
    flat = by_place(pool)
    assert flat.shape == (2, 15, 72)
    np.testing.assert_array_equal(gather(flat, (1, page[kept] * 3 + offset[kept])), stored[kept])
    changed = {RowFormat.PLAIN: False, RowFormat.ROUNDED: True, RowFormat.FP8: True}
    assert (stored != new).any() == changed[row_format]


def test_formats_round_alike() -> None:
    rows = jnp.asarray(rows_of_every_size(72)[:50])
    rounded, packed = (
        empty_rows((), 72, kind, num_rotary=16, dtype=jnp.float32)
        for kind in (RowFormat.ROUNDED, RowFormat.FP8)
    )
    np.testing.assert_array_equal(as_stored(rows, rounded), as_stored(rows, packed))


def test_keys_are_plain_beside_rounded_rows() -> None:
    for kind in (RowFormat.PLAIN, RowFormat.ROUNDED):
        keys = empty_keys((2, 3), 16, kind, dtype=jnp.bfloat16)
        assert isinstance(keys, jax.Array)
        assert keys.dtype == jnp.bfloat16
    keys = empty_keys((2, 3), 16, RowFormat.FP8, dtype=jnp.bfloat16, fill=np.nan)
    assert isinstance(keys, Fp8Keys)
    assert np.isnan(decode(keys)).all()
    new = jnp.arange(16.0)
    keys = scatter(keys, (1, 2), new)
    np.testing.assert_array_equal(gather(keys, (1, 2)), decode(encode(new, keys)))
    assert np.isnan(gather(keys, (1, 1))).all()


def test_a_row_that_is_not_finite_stays_so() -> None:
    for bad in (np.nan, np.inf):
        row = jnp.ones(80).at[3].set(bad)
        assert not np.isfinite(dequantize_rows(quantize_rows(row, 8))[3])
        assert not np.isfinite(decode(quantize_keys(row))[3])
