"""Packed rows: every field in its column, and rows cut up for a program that holds fewer of them."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.decode.packing import PackedRows, pack, unpack_rows
from dspark_jax.decode.plan import RowPlan, StepPlan
from dspark_jax.decode.row_layout import MAX_STOP_IDS, NUM_FLOATS, NUM_INTS


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


def test_what_is_packed_is_what_the_step_reads() -> None:
    chunk = np.array([7, 8, 9], np.int32)
    bool_of_numpy: Any = np.bool_(False)
    prompt = RowPlan(
        slot=3, prompt_ids=chunk, start=4, samples=bool_of_numpy, limit=50, prompt_len=20, top_k=11
    )
    decode = RowPlan(
        slot=1,
        draft_cap=7,
        limit=60,
        prompt_len=21,
        min_len=30,
        stop_ids=(5, 6),
        seed=0xFEDC_BA98_8765_4321,
        temperature=0.5,
        top_p=0.75,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        wants_logprobs=True,
    )
    plan = StepPlan(
        rows=(prompt, decode),
        page_table=np.zeros((4, 1), np.int32),
        budget=2,
        bucket=8,
        drafts=True,
        min_depth=3,
    )
    packed = pack(plan, rows=3)
    assert np.asarray(packed.prompt_ids).tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    rows = unpack_rows(packed.rows)
    expected = {
        "slot": [3, 1, -1],
        "num_prompt": [3, 0, 0],
        "start": [4, 0, 0],
        "samples": [False, True, False],
        "draft_cap": [0, 7, 0],
        "limit": [50, 60, 0],
        "prompt_len": [20, 21, 0],
        "wants_logprobs": [False, True, False],
        "wants_prompt_logprobs": [False, False, False],
        "is_decode": [False, True, False],
    }
    for name, values in expected.items():
        assert np.asarray(getattr(rows, name)).tolist() == values, name
    assert np.asarray(rows.min_depth).tolist()[:2] == [3, 3]
    sampling = rows.sampling
    assert np.asarray(sampling.top_k).tolist() == [11, 0, 0]
    assert np.asarray(sampling.min_len).tolist() == [0, 30, 0]
    assert np.asarray(sampling.seed)[1].tolist() == [0x8765_4321, 0xFEDC_BA98]
    assert np.asarray(sampling.stop_ids)[1].tolist() == [5, 6] + [-1] * (MAX_STOP_IDS - 2)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        assert np.asarray(getattr(sampling, name))[1] == getattr(decode, name), name
    assert np.asarray(sampling.repetition_penalty).tolist() == [1.0, 1.25, 1.0]
