"""Packed rows, cut up for a program that holds fewer of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.decode.packing import NUM_FLOATS, NUM_INTS, PackedRows


@given(num_rows=st.integers(1, 40), unused=st.integers(0, 8), rows=st.integers(1, 48))
def test_parts_hold_every_used_row_once_and_in_order(num_rows: int, unused: int, rows: int) -> None:
    total = num_rows + unused
    packed = PackedRows(
        ints=np.arange(total * NUM_INTS, dtype=np.int32).reshape(total, NUM_INTS),
        floats=np.arange(total * NUM_FLOATS, dtype=np.float32).reshape(total, NUM_FLOATS),
    )
    parts = packed.parts(num_rows, rows)
    assert [len(part.ints) for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert len(parts[-1].ints) <= rows
    np.testing.assert_array_equal(np.concatenate([p.ints for p in parts]), packed.ints[:num_rows])
    np.testing.assert_array_equal(
        np.concatenate([p.floats for p in parts]), packed.floats[:num_rows]
    )
    # What fills up the last part is marked as unused.
    assert np.all(np.asarray(parts[-1].resized(rows).ints)[len(parts[-1].ints) :, 0] == -1)
