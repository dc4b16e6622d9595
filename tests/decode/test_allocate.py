"""The device's allocation against the host's definition."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.budget import allocate as allocate_reference
from dspark_jax.decode.allocate import allocate

SHAPES = [(5, 7), (3, 16)]
run = jax.jit(allocate)
VALUES = {
    # Products of sixteen stay normal numbers: smaller ones are zero on some devices and not on others.
    "any": st.one_of(st.just(0.0), st.floats(2**-7, 1, width=32)),
    "ties": st.sampled_from([1.0, 0.5, 0.25, 0.0]),
    "saturated": st.sampled_from([1.0, 1.0, 1.0, 0.99]),
    "broken": st.sampled_from([np.nan, np.inf, -np.inf, -0.0, -1.0, 2.0, 0.7]),
}


@st.composite
def problems(draw, values):
    rows, drafts = draw(st.sampled_from(SHAPES))
    flat = draw(st.lists(values, min_size=rows * drafts, max_size=rows * drafts))
    caps = draw(st.lists(st.integers(0, drafts), min_size=rows, max_size=rows))
    budget = draw(st.integers(0, sum(caps)))
    return np.array(flat, np.float32).reshape(rows, drafts), np.array(caps, np.int32), budget


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_case_26_equals_the_definition(values, data):
    confidences, caps, budget = data.draw(problems(values))
    min_depth = data.draw(st.integers(0, 4))
    lens = np.asarray(run(confidences, caps, np.int32(budget), np.int32(min_depth)))
    assert lens.dtype == np.int32
    expected = allocate_reference(confidences, caps, budget, min_depth=min_depth)
    assert lens.tolist() == expected.tolist()


def test_the_floor_of_a_row_is_its_own():
    confidences = np.array([[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]], np.float32)
    caps = np.array([3, 3], np.int32)
    floors = np.array([2, 0], np.int32)
    assert run(confidences, caps, np.int32(3)).tolist() == [0, 3]
    assert run(confidences, caps, np.int32(3), floors).tolist() == [2, 1]


def test_a_budget_beyond_the_caps_admits_them_all():
    confidences = np.full((5, 7), 0.5, np.float32)
    caps = np.array([0, 1, 3, 7, 2], np.int32)
    assert run(confidences, caps, np.int32(99)).tolist() == caps.tolist()


@settings(deadline=None, max_examples=100)
@given(problems(VALUES["any"]), st.data())
def test_a_token_has_no_say_in_its_own_admission(problem, data):
    """Confidences behind a slot, which depend on its token, may change: the slot is admitted as before."""
    confidences, caps, budget = problem
    row = data.draw(st.integers(0, len(caps) - 1))
    slot = data.draw(st.integers(0, confidences.shape[1] - 1))
    changed = confidences.copy()
    behind = changed[row, slot + 1 :]
    behind[:] = data.draw(st.lists(VALUES["any"], min_size=len(behind), max_size=len(behind)))
    before, after = (run(c, caps, np.int32(budget))[row] for c in (confidences, changed))
    assert (before > slot) == (after > slot)


def test_illustration_keeps_the_best_11_of_21_slots():
    confidences = np.array(
        [
            [0.97, 0.95, 0.94, 0.92, 0.90, 0.88, 0.85],
            [0.85, 0.80, 0.75, 0.70, 0.60, 0.55, 0.50],
            [0.60, 0.50, 0.45, 0.40, 0.35, 0.30, 0.25],
        ],
        np.float32,
    )
    assert run(confidences, np.full(3, 7, np.int32), np.int32(11)).tolist() == [7, 3, 1]
