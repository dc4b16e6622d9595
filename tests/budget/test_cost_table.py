"""Cost tables: expansion of curves, contexts, floors, live correction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.budget import CostCurves, CostTable, LiveCorrection, expand_curve


def table(verify, draft=None, *, context_len=0, max_tokens=40, max_requests=8, **kwargs):
    curves = CostCurves(context_len=context_len, verify=verify, draft=draft or {1: 0.0})
    return CostTable([curves], max_tokens=max_tokens, max_requests=max_requests, **kwargs)


def test_case_16_staircase_and_extrapolation():
    verify = expand_curve({1: 2.0, 8: 3.0, 64: 5.0}, 65)
    assert verify[[0, 2, 9]].tolist() == [2.0, 3.0, 5.0]
    assert verify[65] == pytest.approx(5.0 + 2.0 / 56.0, rel=1e-15)
    draft = expand_curve({1: 0.2, 4: 0.8, 8: 1.6}, 9)
    assert draft[2] == 0.8
    assert draft[9] == pytest.approx(1.8, rel=1e-15)


def test_case_17_interpolation_above_the_capture_limit():
    ms = expand_curve({8: 1.0, 16: 2.0, 24: 6.0, 32: 8.0}, 40, capture_limit=16)
    assert ms.shape == (41,)
    assert ms[[16, 17, 24, 28, 32, 36, 40]].tolist() == [2.0, 6.0, 6.0, 7.0, 8.0, 9.0, 10.0]


def test_case_18_dips_are_flattened():
    ms = expand_curve({8: 3.0, 16: 2.0, 32: 4.0}, 32)
    assert ms[[8, 9, 16, 17]].tolist() == [3.0, 3.0, 3.0, 4.0]


def test_case_19_single_point_is_constant():
    assert expand_curve({4: 2.5}, 10).tolist() == [2.5] * 11


def test_case_19_zero_timings_are_floored():
    cost = table({1: 0.0, 8: 0.0}, {1: 0.0})
    assert cost.step_ms(5, 1, draft=True, context_len=0) == 1e-6
    assert cost.steps_ms(0, 40, 8, draft=True, context_len=0).min() == 1e-6


@pytest.mark.parametrize(("verify", "draft"), [({}, {1: 1.0}), ({1: 1.0}, {})])
def test_case_19_empty_curve_names_the_switch(verify, draft):
    with pytest.raises(ValueError, match='"enable_adaptive_verification": false'):
        CostCurves(context_len=0, verify=verify, draft=draft)


def test_no_curves_name_the_switch():
    with pytest.raises(ValueError, match='"enable_adaptive_verification": false'):
        CostTable([], max_tokens=8, max_requests=1)


@pytest.mark.parametrize("ms", [float("nan"), float("inf")])
def test_times_that_are_not_finite_are_refused(ms):
    with pytest.raises(ValueError, match="finite"):
        expand_curve({1: 1.0, 2: ms}, 4)


@given(
    curve=st.dictionaries(st.integers(0, 60), st.floats(0, 100), min_size=1),
    capture_limit=st.none() | st.integers(1, 60),
)
def test_tables_never_fall(curve, capture_limit):
    ms = expand_curve(curve, 80, capture_limit=capture_limit)
    assert (np.diff(ms) >= -1e-9).all()
    for count, value in curve.items():
        assert ms[count] >= value


def test_without_a_limit_everything_measured_is_a_staircase():
    ms = expand_curve({8: 1.0, 16: 2.0, 32: 8.0}, 32)
    assert ms[17:33].tolist() == [8.0] * 16


def test_step_cost_adds_the_drafter_of_that_many_requests():
    cost = table({8: 3.0}, {1: 0.5, 4: 2.0})
    assert cost.step_ms(6, 3, draft=True, context_len=0) == 5.0
    assert cost.step_ms(6, 3, draft=False, context_len=0) == 3.0


def test_context_is_interpolated_between_profiles_and_clamped_outside():
    near = CostCurves(context_len=1000, verify={8: 2.0}, draft={1: 1.0})
    far = CostCurves(context_len=3000, verify={8: 6.0}, draft={1: 2.0})
    cost = CostTable([far, near], max_tokens=8, max_requests=1)
    times = [
        cost.step_ms(8, 1, draft=True, context_len=c) for c in (0, 1000, 1500, 2000, 3000, 90000)
    ]
    assert times == [3.0, 3.0, 4.25, 5.5, 8.0, 8.0]


def test_equal_contexts_are_refused():
    curves = CostCurves(context_len=5, verify={1: 1.0}, draft={1: 1.0})
    with pytest.raises(ValueError, match="must differ"):
        CostTable([curves, curves], max_tokens=8, max_requests=1)


@pytest.mark.parametrize(("tokens", "requests"), [(41, 1), (-1, 1), (8, 9)])
def test_case_14_outside_the_table_is_an_error(tokens, requests):
    with pytest.raises(ValueError, match="outside the cost table"):
        table({8: 1.0}).step_ms(tokens, requests, draft=True, context_len=0)


def test_correction_moves_the_observed_bucket_and_pools_for_the_rest():
    correction = LiveCorrection([8, 16, 32], 40, rate=0.5)
    cost = table({8: 1.0, 16: 2.0, 32: 4.0}, correction=correction)
    for _ in range(40):
        cost.observe(8, 1, draft=True, context_len=0, measured_ms=1.5)
        cost.observe(16, 1, draft=True, context_len=0, measured_ms=3.0)
    assert cost.step_ms(5, 1, draft=True, context_len=0) == pytest.approx(1.5)
    assert cost.step_ms(16, 1, draft=True, context_len=0) == pytest.approx(3.0)
    # Never visited: the slow-down common to the others holds here too.
    assert cost.step_ms(40, 1, draft=True, context_len=0) == pytest.approx(7.5)


def test_correction_learns_from_the_uncorrected_prediction():
    cost = table({8: 1.0}, correction=LiveCorrection([8], 40, rate=0.5))
    for _ in range(60):
        cost.observe(8, 1, draft=True, context_len=0, measured_ms=1.25)
    assert cost.step_ms(8, 1, draft=True, context_len=0) == pytest.approx(1.25)


def test_correction_must_reach_as_far_as_the_table():
    with pytest.raises(ValueError, match="ends at 39 tokens, the table at 40"):
        table({8: 1.0}, correction=LiveCorrection([8], 39))


def test_correction_is_bounded():
    correction = LiveCorrection([8], 8, rate=1.0)
    correction.observe(8, predicted_ms=1.0, measured_ms=1e9)
    assert correction.ratios(0, 8).tolist() == [2.0] * 9
    correction.observe(8, predicted_ms=1.0, measured_ms=1e-9)
    assert correction.ratios(8, 8).tolist() == [0.5]


@pytest.mark.parametrize("measured_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_counted_and_dropped(measured_ms):
    correction = LiveCorrection([8], 8, rate=1.0)
    correction.observe(8, predicted_ms=1.0, measured_ms=measured_ms)
    assert correction.num_ignored == 1
    assert correction.ratios(0, 8).tolist() == [1.0] * 9


def test_corrected_costs_never_fall():
    correction = LiveCorrection([8, 16], 16, rate=1.0)
    cost = table({8: 2.0, 16: 2.5}, max_tokens=16, correction=correction)
    cost.observe(8, 1, draft=True, context_len=0, measured_ms=4.0)
    cost.observe(16, 1, draft=True, context_len=0, measured_ms=2.0)
    assert cost.steps_ms(8, 9, 1, draft=True, context_len=0).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"token_buckets": []},
        {"token_buckets": [8, 8]},
        {"token_buckets": [8], "rate": 0.0},
        {"token_buckets": [8], "min_ratio": 1.5},
        {"token_buckets": [8], "max_ratio": 0.9},
    ],
)
def test_correction_refuses_nonsense(arguments):
    with pytest.raises(ValueError):
        LiveCorrection(max_tokens=8, **arguments)


def test_fewer_buckets_make_the_stairs_wider():
    curve = CostCurves(context_len=0, verify={1: 1.0, 4: 2.0, 8: 3.0, 16: 9.0}, draft={4: 1.0})
    table = CostTable([curve], max_tokens=16, max_requests=4)
    cut = table.padded_to((4, 16))
    ms = lambda t, n: t.step_ms(n, 1, draft=False, context_len=0)
    assert [ms(cut, n) for n in (1, 4, 5, 8, 16)] == [2.0, 2.0, 9.0, 9.0, 9.0]
    assert [ms(table, n) for n in (1, 5, 9)] == [1.0, 3.0, 9.0]
    assert cut.step_ms(5, 2, draft=True, context_len=0) == 10.0
    with pytest.raises(ValueError, match="must end at 16 tokens"):
        table.padded_to((4, 8))
