"""Allocation and layouts: the definitions themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.budget import allocate, host_placeholder, step_layout

# Three requests with seven drafts each; the published illustration keeps the best 11 of 21 slots.
ILLUSTRATION = np.array(
    [
        [0.97, 0.95, 0.94, 0.92, 0.90, 0.88, 0.85],
        [0.85, 0.80, 0.75, 0.70, 0.60, 0.55, 0.50],
        [0.60, 0.50, 0.45, 0.40, 0.35, 0.30, 0.25],
    ],
    dtype=np.float32,
)


ANY_CONFIDENCE = st.floats(0.0, 1.0, width=32)


@st.composite
def problems(draw, *, values=ANY_CONFIDENCE):
    num_requests = draw(st.integers(1, 6))
    draft_len = draw(st.integers(1, 7))
    confidences = draw(
        st.lists(
            st.lists(values, min_size=draft_len, max_size=draft_len),
            min_size=num_requests,
            max_size=num_requests,
        )
    )
    draft_lens = draw(
        st.lists(st.integers(0, draft_len), min_size=num_requests, max_size=num_requests)
    )
    budget = draw(st.integers(0, sum(draft_lens)))
    return np.array(confidences, dtype=np.float32), np.array(draft_lens), budget


def brute_force(confidences, draft_lens, budget):
    """One slot at a time: the best next slot of any request, by the tie rule."""
    lens = np.zeros(len(draft_lens), dtype=int)
    for _ in range(budget):
        options = []
        for row in range(len(draft_lens)):
            if lens[row] < draft_lens[row]:
                survival = np.float32(1)
                for c in confidences[row, : lens[row] + 1]:
                    survival = np.float32(survival * c)
                options.append((-float(survival), int(lens[row]), row))
        lens[min(options)[2]] += 1
    return lens


@given(problems())
def test_case_26_best_slots_as_prefixes(problem):
    confidences, draft_lens, budget = problem
    lens = allocate(confidences, draft_lens, budget)
    assert lens.dtype == np.int32
    assert lens.sum() == budget
    assert (lens <= draft_lens).all()
    survival = np.cumprod(confidences, axis=1, dtype=np.float32)
    position = np.arange(confidences.shape[1])
    admitted = survival[position < lens[:, None]]
    refused = survival[(position >= lens[:, None]) & (position < draft_lens[:, None])]
    if admitted.size and refused.size:
        assert admitted.min() >= refused.max()


@given(problems())
def test_case_26_equals_taking_one_slot_at_a_time(problem):
    assert allocate(*problem).tolist() == brute_force(*problem).tolist()


def test_case_26_nothing_and_everything():
    draft_lens = np.array([2, 0, 7])
    confidences = np.full((3, 7), 0.5, dtype=np.float32)
    assert allocate(confidences, draft_lens, 0).tolist() == [0, 0, 0]
    assert allocate(confidences, draft_lens, 9).tolist() == [2, 0, 7]


@given(problems(values=st.sampled_from([1.0, 0.5])))
def test_case_27_ties_follow_the_rule(problem):
    assert allocate(*problem).tolist() == brute_force(*problem).tolist()


def test_case_27_equal_confidences_fill_position_by_position():
    ones = np.ones((3, 4), dtype=np.float32)
    assert allocate(ones, np.array([4, 4, 4]), 5).tolist() == [2, 2, 1]
    assert allocate(ones, np.array([1, 4, 4]), 8).tolist() == [1, 4, 3]
    halves = np.full((3, 4), 0.5, dtype=np.float32)
    assert allocate(halves, np.array([4, 4, 4]), 4).tolist() == [2, 1, 1]


def test_case_13_slots_that_were_not_offered_never_win():
    confidences = np.ones((4, 7), dtype=np.float32)
    assert allocate(confidences, np.array([0, 1, 3, 7]), 11).tolist() == [0, 1, 3, 7]
    assert allocate(confidences, np.array([0, 1, 3, 7]), 4).tolist() == [0, 1, 2, 1]


def test_case_12_odd_confidences_still_give_prefixes():
    confidences = np.array([[np.nan, 0.9], [1.5, 0.5], [0.8, -1.0]], dtype=np.float32)
    assert allocate(confidences, np.array([2, 2, 2]), 3).tolist() == [0, 2, 1]
    assert allocate(confidences, np.array([2, 2, 2]), 6).tolist() == [2, 2, 2]


def test_min_depth_comes_first():
    confidences = np.array([[0.01, 0.01], [0.9, 0.9]], dtype=np.float32)
    assert allocate(confidences, np.array([2, 2]), 2).tolist() == [0, 2]
    assert allocate(confidences, np.array([2, 2]), 2, min_depth=1).tolist() == [1, 1]
    assert allocate(confidences, np.array([2, 2]), 1, min_depth=1).tolist() == [0, 1]


@pytest.mark.parametrize("budget", [-1, 4])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        allocate(np.ones((2, 2), dtype=np.float32), np.array([1, 2]), budget)


def test_illustration_keeps_the_best_11_of_21_slots():
    lens = allocate(ILLUSTRATION, np.full(3, 7), 11)
    assert lens.tolist() == [7, 3, 1]
    survival = np.sort(np.cumprod(ILLUSTRATION, axis=1), axis=None)[::-1]
    kept = np.concatenate([np.cumprod(r)[:n] for r, n in zip(ILLUSTRATION, lens, strict=True)])
    np.testing.assert_allclose(np.sort(kept)[::-1], survival[:11])


@pytest.mark.parametrize(("budget", "lens"), [(0, [0, 0, 0]), (2, [2, 0, 0]), (3, [2, 1, 0])])
def test_case_28_layout(budget, lens):
    confidences = np.array([[0.9, 0.9], [0.5, 0.5], [0.99, 0.99]], dtype=np.float32)
    query_lens = np.array([1, 1, 5])
    verify_lens = allocate(confidences, np.array([2, 1, 0]), budget)
    assert verify_lens.tolist() == lens
    layout = step_layout(query_lens, verify_lens, num_rows=6)
    assert layout.cu_q_lens[:4].tolist() == [0, 1 + lens[0], 2 + lens[0] + lens[1], 7 + budget]
    assert layout.cu_q_lens[3:].tolist() == [7 + budget] * 4
    assert layout.cu_num_logits.tolist() == [0, 1 + lens[0], 2 + lens[0] + lens[1], 3 + budget]
    assert layout.cu_q_lens.dtype == layout.cu_num_logits.dtype == np.int32


def test_layout_needs_enough_rows():
    with pytest.raises(ValueError, match="3 requests"):
        step_layout(np.ones(3, int), np.zeros(3, int), num_rows=2)


def test_case_29_placeholder_is_an_even_split():
    query_lens, draft_lens = np.array([1, 1, 1, 9]), np.array([7, 2, 7, 0])
    layout = host_placeholder(query_lens, draft_lens, 11)
    assert np.diff(layout.cu_q_lens).tolist() == [5, 5, 4, 9]
    assert layout.cu_num_logits.tolist() == [0, 8, 11, 19, 20]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.lists(st.integers(1, 50), max_size=3),
    st.data(),
)
def test_case_29_placeholder_bounds(drafts, chunks, data):
    draft_lens = np.array(drafts + [0] * len(chunks))
    query_lens = np.array([1] * len(drafts) + chunks)
    budget = data.draw(st.integers(0, sum(drafts)))
    layout = host_placeholder(query_lens, draft_lens, budget)
    q_lens = np.diff(layout.cu_q_lens)
    assert layout.cu_q_lens[-1] == query_lens.sum() + budget
    assert (q_lens[: len(drafts)] <= 8).all()
    assert q_lens[len(drafts) :].tolist() == chunks
    assert layout.cu_q_lens.dtype == layout.cu_num_logits.dtype == np.int32
    if budget == 0:
        assert layout.cu_num_logits.tolist() == list(range(draft_lens.size + 1))
        assert q_lens.tolist() == query_lens.tolist()
    if budget == sum(drafts):
        assert q_lens.tolist() == (query_lens + draft_lens).tolist()


def test_case_29_requests_with_drafts_must_come_first():
    with pytest.raises(ValueError, match="must come first"):
        host_placeholder(np.array([5, 1, 1]), np.array([0, 3, 3]), 2)
