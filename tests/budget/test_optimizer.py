"""Budgets: published examples, limits, properties against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.budget import (
    BudgetLimits,
    BudgetPolicy,
    CostCurves,
    CostTable,
    LiveCorrection,
    choose_budget,
    logit_rows_in_chunk,
)

PLAIN = BudgetPolicy(hysteresis=0.0)


def staircase(verify, draft=None, *, max_tokens=None, max_requests=256, **kwargs):
    curves = CostCurves(context_len=0, verify=verify, draft=draft or {1: 0.0})
    max_tokens = max(verify) if max_tokens is None else max_tokens
    return CostTable([curves], max_tokens=max_tokens, max_requests=max_requests, **kwargs)


def flat(max_tokens=4096):
    return staircase({max_tokens: 1.0})


def choose(
    confidences,
    cost,
    *,
    draft_lens=None,
    query_lens=None,
    samples=None,
    policy=PLAIN,
    max_logit_rows=10_000,
):
    confidences = np.atleast_2d(np.asarray(confidences, dtype=np.float32))
    num_requests, draft_len = confidences.shape
    full = np.full(num_requests, draft_len)
    return choose_budget(
        confidences,
        full if draft_lens is None else np.asarray(draft_lens),
        np.ones(num_requests, dtype=int) if query_lens is None else np.asarray(query_lens),
        np.ones(num_requests, dtype=bool) if samples is None else np.asarray(samples),
        cost,
        0.0,
        BudgetLimits(max_logit_rows=max_logit_rows),
        policy,
    )


both_policies = pytest.mark.parametrize("policy", [PLAIN, BudgetPolicy()])


@both_policies
def test_case_01_expensive_after_three_tokens(policy):
    cost = staircase({t: ms for t, ms in enumerate([1, 1, 1, 1, 100, 100, 100])})
    decision = choose([[0.1, 0.1], [0.9, 0.9]], cost, policy=policy)
    assert decision.budget == 1
    assert decision.num_tokens == 3
    assert decision.predicted_tokens == pytest.approx(2.9)
    assert decision.predicted_ms == 1.0


@both_policies
def test_case_02_ratios(policy):
    steps_per_s = [1, 1, 1, 0.95, 0.9, 0.2, 0.1]
    cost = staircase({t: 1000 / rate for t, rate in enumerate(steps_per_s)})
    decision = choose([[0.9, 0.8], [0.6, 0.5]], cost, policy=policy)
    assert decision.budget == 2
    assert decision.tokens_per_ms == pytest.approx(0.003258, abs=5e-7)
    assert decision.num_sampling / decision.plain_ms == pytest.approx(0.002)


@both_policies
@pytest.mark.parametrize(("confidence", "budget"), [(0.5, 12), (0.0, 0)])
def test_case_03_flat_cost(policy, confidence, budget):
    assert choose(np.full((4, 3), confidence), flat(), policy=policy).budget == budget


@both_policies
def test_case_04_ten_times_dearer_beyond_the_queries(policy):
    cost = staircase({4: 1.0, 8: 10.0})
    decision = choose(
        [[0.9, 0.8], [0.7, 0.6]],
        cost,
        query_lens=[1, 3],
        samples=[True, False],
        policy=policy,
    )
    assert decision.budget == 0
    assert decision.num_sampling == 1


@both_policies
@pytest.mark.parametrize(("num_requests", "budget"), [(1, 7), (2, 14), (3, 13), (4, 12), (8, 24)])
def test_case_05_non_unimodal_staircase(policy, num_requests, budget):
    cost = staircase({8: 5.0, 16: 5.5, 32: 8.0, 48: 40.0, 64: 50.0}, {1: 1.0}, capture_limit=32)
    decision = choose(np.full((num_requests, 7), 0.7), cost, policy=policy)
    assert decision.budget == budget
    assert decision.num_tokens in (8, 16, 32)


confidence_rows = st.integers(1, 5).flatmap(
    lambda draft_len: st.lists(
        st.lists(st.floats(0.0625, 1.0, width=32), min_size=draft_len, max_size=draft_len),
        min_size=1,
        max_size=5,
    )
)
edges = st.dictionaries(st.integers(1, 40), st.floats(0.1, 50.0), min_size=1)


def brute_force(confidences, cost, max_budget):
    """Every budget in a loop: smallest one with the best rate, and all rates."""
    confidences = np.asarray(confidences, dtype=np.float64)
    num_requests, _ = confidences.shape
    survival = sorted(np.cumprod(confidences, axis=1).ravel().tolist(), reverse=True)
    rates = []
    expected = float(num_requests)
    for budget in range(max_budget + 1):
        if budget:
            expected += survival[budget - 1]
        ms = cost.step_ms(num_requests + budget, num_requests, draft=True, context_len=0)
        rates.append(expected / ms)
    return int(np.argmax(rates)), rates


@given(confidence_rows, edges)
def test_case_06_budget_fills_a_bucket(confidences, verify):
    cost = staircase(verify, max_tokens=max(64, *verify))
    decision = choose(confidences, cost)
    num_drafts = np.size(confidences)
    ms = np.append(
        cost.steps_ms(0, cost.max_tokens, len(confidences), draft=True, context_len=0), np.inf
    )
    is_edge = ms[decision.num_tokens + 1] > ms[decision.num_tokens]
    assert is_edge or decision.budget == num_drafts


@given(
    confidences=confidence_rows,
    verify=edges,
    draft=st.dictionaries(st.integers(1, 6), st.floats(0.0, 5.0), min_size=1),
    capture_limit=st.none() | st.integers(1, 40),
)
def test_case_07_equals_brute_force(confidences, verify, draft, capture_limit):
    cost = staircase(verify, draft, max_tokens=64, capture_limit=capture_limit)
    decision = choose(confidences, cost)
    budget, rates = brute_force(confidences, cost, np.size(confidences))
    assert decision.budget == budget
    assert decision.tokens_per_ms == pytest.approx(rates[budget], rel=1e-12)
    assert decision.tokens_per_ms >= max(rates) * (1 - 1e-12)


@given(confidences=confidence_rows, verify=edges, exponent=st.integers(-8, 8))
def test_case_07_scaling_all_costs_changes_nothing(confidences, verify, exponent):
    # Powers of two, so that ties stay ties.
    scale = 2.0**exponent
    scaled = {t: ms * scale for t, ms in verify.items()}
    budgets = [
        choose(confidences, staircase(curve, {1: 0.5 * s}, max_tokens=64)).budget
        for curve, s in ((verify, 1.0), (scaled, scale))
    ]
    assert budgets[0] == budgets[1]


@given(confidences=confidence_rows, data=st.data())
def test_case_08_a_higher_confidence_never_expects_fewer_tokens(confidences, data):
    before = np.asarray(confidences, dtype=np.float32)
    after = before.copy()
    row = data.draw(st.integers(0, before.shape[0] - 1))
    position = data.draw(st.integers(0, before.shape[1] - 1))
    after[row, position] = data.draw(st.floats(float(before[row, position]), 1.0, width=32))
    budget = data.draw(st.integers(0, before.size))
    # A cliff behind the budget pins it, so that tokens(B) can be read off the decision.
    cost = staircase({before.shape[0] + budget: 1.0, 64: 1e6})
    expected = [choose(c, cost) for c in (before, after)]
    assert [d.budget for d in expected] == [budget, budget]
    assert expected[1].predicted_tokens >= expected[0].predicted_tokens * (1 - 1e-12)


def test_case_09_sampler_limit():
    confidences = np.full((2, 3), 0.9)
    assert choose(confidences, flat(), max_logit_rows=3).budget == 1
    assert choose(confidences, flat(), max_logit_rows=2).budget == 0
    assert choose(confidences, flat(), max_logit_rows=1).budget == 0


def test_sampler_limit_of_known_vocabularies():
    assert [logit_rows_in_chunk(v) for v in (129_280, 151_936, 248_320)] == [2076, 1766, 1081]
    assert logit_rows_in_chunk(2**40) == 1


@both_policies
def test_case_10_only_prompt_chunks(policy):
    decision = choose(
        np.ones((2, 3)),
        staircase({64: 2.0}),
        draft_lens=[0, 0],
        query_lens=[20, 30],
        samples=[False, False],
        policy=policy,
    )
    assert (decision.budget, decision.num_tokens, decision.num_sampling) == (0, 50, 0)
    assert (decision.predicted_ms, decision.predicted_tokens) == (2.0, 0.0)
    assert decision.tokens_per_ms == decision.gain == 0.0


def test_an_empty_batch_has_a_decision():
    decision = choose(np.ones((0, 3)), flat(), draft_lens=np.zeros(0, dtype=int))
    assert (decision.budget, decision.num_tokens) == (0, 0)


@pytest.mark.parametrize(("finishes", "num_sampling"), [(False, 2), (True, 3)])
def test_case_11_prefill_tokens_are_in_the_cost(finishes, num_sampling):
    cost = staircase({43: 1.0, 64: 100.0})
    decision = choose(
        np.full((3, 7), 0.9),
        cost,
        draft_lens=[7, 7, 0],
        query_lens=[1, 1, 40],
        samples=[True, True, finishes],
    )
    assert decision.num_tokens == 43
    assert decision.num_query_tokens == 42
    assert decision.num_sampling == num_sampling
    assert decision.predicted_tokens == pytest.approx(num_sampling + 0.9)


def test_prefill_at_flat_cost_admits_every_draft():
    decision = choose(
        np.full((3, 7), 0.3),
        flat(),
        draft_lens=[7, 7, 0],
        query_lens=[1, 1, 40],
        samples=[True, True, False],
    )
    assert decision.budget == 14


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [(np.nan, 0.0), (np.inf, 1.0), (-np.inf, 0.0), (-0.25, 0.0), (1.5, 1.0)],
)
def test_case_12_odd_confidences_are_cleaned_and_counted(dirty, clean):
    cost = staircase({4: 1.0, 6: 1.2, 16: 2.0})
    rows = [[0.9, 0.8, 0.9], [0.7, 0.6, 0.5]]
    rows[0][1] = dirty
    decision = choose(rows, cost)
    rows[0][1] = clean
    expected = choose(rows, cost)
    assert (decision.num_sanitised, expected.num_sanitised) == (1, 0)
    assert decision.budget == expected.budget
    assert decision.predicted_tokens == expected.predicted_tokens


def test_case_12_all_nan_verifies_nothing():
    decision = choose(np.full((2, 3), np.nan), flat())
    assert (decision.budget, decision.num_sanitised) == (0, 6)


def test_case_13_slots_that_were_not_offered_never_count():
    decision = choose(np.ones((4, 7)), flat(), draft_lens=[0, 1, 3, 7])
    assert decision.budget == 11
    assert decision.predicted_tokens == 15.0


def test_case_14_largest_step_fits_and_one_more_token_does_not():
    cost = staircase({16: 1.0})
    confidences = np.full((2, 7), 0.9)
    assert choose(confidences, cost).num_tokens == 16
    with pytest.raises(ValueError, match=r"3 query and 14 draft tokens .* at most 16"):
        choose(confidences, cost, query_lens=[1, 2])


def test_more_drafts_than_positions_are_refused():
    with pytest.raises(ValueError, match="draft_lens"):
        choose(np.ones((1, 3)), flat(), draft_lens=[4])


@given(confidence_rows, edges)
def test_never_predicted_slower_than_either_end(confidences, verify):
    cost = staircase(verify, {1: 0.5}, max_tokens=64)
    decision = choose(confidences, cost, policy=BudgetPolicy(hysteresis=0.05))
    best, rates = brute_force(confidences, cost, np.size(confidences))
    assert decision.tokens_per_ms >= max(rates[0], rates[-1]) * (1 - 1e-12)
    assert decision.tokens_per_ms * 1.05 >= rates[best] * (1 - 1e-12)


def test_hysteresis_takes_the_end_that_is_almost_as_fast():
    # Rates 1, 1.004 × the full draft's, and the full draft's: not worth trusting the table for.
    cost = staircase({2: 1.0, 3: 1.0 * 2.2 / 1.9 * 1.004})
    confidences = [[0.9, 1 / 3]]
    assert choose(confidences, cost, policy=PLAIN).budget == 1
    assert choose(confidences, cost, policy=BudgetPolicy(hysteresis=0.01)).budget == 2
    assert choose(confidences, cost, policy=BudgetPolicy(hysteresis=0.003)).budget == 1


def test_hysteresis_does_not_verify_a_hopeless_tail():
    decision = choose([[0.9, 0.0, 0.0]], flat(), policy=BudgetPolicy())
    assert decision.budget == 1


def test_fixed_and_none():
    confidences = np.full((2, 3), 0.01)
    cost = staircase({2: 1.0, 8: 100.0}, {2: 3.0})
    fixed = choose(confidences, cost, policy=BudgetPolicy(mode="fixed"))
    none = choose(confidences, cost, policy=BudgetPolicy(mode="none", min_depth=1))
    assert (fixed.budget, fixed.predicted_ms) == (6, 103.0)
    assert (none.budget, none.predicted_ms, none.plain_ms) == (0, 1.0, 1.0)


def test_min_depth_is_verified_whatever_it_costs():
    cost = staircase({3: 1.0, 6: 100.0, 32: 200.0})
    confidences = np.full((3, 4), 0.1)
    assert choose(confidences, cost).budget == 0
    decision = choose(confidences, cost, draft_lens=[4, 1, 0], policy=BudgetPolicy(min_depth=2))
    assert decision.budget == 3
    assert decision.predicted_tokens == pytest.approx(3 + 0.1 + 0.01 + 0.1)


def test_min_depth_counts_its_slots_before_better_ones():
    # Row 0 needs its hopeless slot; the sure slots of row 1 come after it.
    cost = staircase({2: 1.0, 4: 1.01, 16: 50.0})
    decision = choose([[0.1, 0.1], [0.9, 0.9]], cost, policy=BudgetPolicy(min_depth=1))
    assert decision.budget == 2
    assert decision.predicted_tokens == pytest.approx(2 + 0.1 + 0.9)


def test_min_depth_yields_to_the_sampler_limit():
    decision = choose(
        np.full((2, 4), 0.5), flat(), policy=BudgetPolicy(min_depth=3), max_logit_rows=5
    )
    assert decision.budget == 3


def brute_force_target(survival, draft_lens, samples, cost, policy):
    """Loop over all budgets, tracking what each request gets: budget → rate, time of the slowest."""
    num_requests, _ = survival.shape
    slots = [(r, i) for r in range(num_requests) for i in range(draft_lens[r])]
    slots.sort(key=lambda s: (s[1] >= policy.min_depth, -survival[s], s[1], s[0]))
    first = sum(min(n, policy.min_depth) for n in draft_lens)
    got = np.ones(num_requests)
    outcomes = {}
    for budget in range(len(slots) + 1):
        if budget:
            got[slots[budget - 1][0]] += survival[slots[budget - 1]]
        if budget < first:
            continue
        ms = cost.step_ms(num_requests + budget, num_requests, draft=True, context_len=0)
        gained = got.sum() - num_requests + samples.sum()
        outcomes[budget] = gained / ms, ms / got[samples].min()
    return outcomes


@given(
    confidences=confidence_rows,
    verify=edges,
    target_ms=st.floats(0.5, 60.0),
    min_depth=st.integers(0, 2),
    capture_limit=st.none() | st.integers(1, 40),
    data=st.data(),
)
def test_target_token_ms_equals_brute_force(
    confidences, verify, target_ms, min_depth, capture_limit, data
):
    cost = staircase(verify, {1: 0.5}, max_tokens=64, capture_limit=capture_limit)
    num_requests, draft_len = np.shape(confidences)
    draft_lens = data.draw(
        st.lists(st.integers(0, draft_len), min_size=num_requests, max_size=num_requests)
    )
    samples = np.array(
        data.draw(st.lists(st.booleans(), min_size=num_requests, max_size=num_requests))
    )
    samples[0] = True
    draft_lens = np.where(samples, draft_lens, 0)
    # Survivals that nearly tie may be handed out in either order: on a grid they tie or differ.
    confidences = np.round(np.asarray(confidences) * 16) / 16
    survival = np.cumprod(confidences, axis=1)
    policy = BudgetPolicy(target_token_ms=target_ms, min_depth=min_depth)
    decision = choose(
        confidences,
        cost,
        draft_lens=draft_lens,
        samples=samples,
        policy=policy,
    )
    outcomes = brute_force_target(survival, draft_lens, samples, cost, policy)
    assert decision.budget in outcomes
    rate, slowest_ms = outcomes[decision.budget]
    assert decision.tokens_per_ms == pytest.approx(rate, rel=1e-9)
    nearest_ms = min(ms for _, ms in outcomes.values())
    allowed_ms = max(target_ms, nearest_ms)
    assert slowest_ms <= allowed_ms * (1 + 1e-9)
    within = [r for r, ms in outcomes.values() if ms <= allowed_ms]
    assert rate >= max(within) * (1 - 1e-9)


def test_target_token_ms_gives_up_throughput():
    cost = staircase({2: 2.0, 4: 3.0, 16: 7.0})
    confidences = [[0.95, 0.95, 0.95, 0.95, 0.95], [0.1, 0.1, 0.1, 0.1, 0.1]]
    assert choose(confidences, cost).num_tokens > 2
    decision = choose(confidences, cost, policy=BudgetPolicy(target_token_ms=2.5))
    assert decision.budget == 0


def test_live_correction_reaches_the_decision():
    correction = LiveCorrection([2, 16], 16, rate=1.0)
    cost = staircase({2: 1.0, 16: 3.5}, correction=correction)
    confidences = np.full((2, 7), 0.7)
    assert choose(confidences, cost).budget == 0
    cost.observe(16, 2, draft=True, context_len=0, measured_ms=1.5)
    cost.observe(2, 2, draft=True, context_len=0, measured_ms=1.0)
    assert choose(confidences, cost).budget == 14


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "adaptiv"},
        {"hysteresis": -0.1},
        {"min_depth": -1},
        {"target_token_ms": 0.0},
        {"prompt_cost": "free"},
    ],
)
def test_policies_refuse_nonsense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        BudgetPolicy(**arguments)


def test_limits_refuse_nonsense():
    with pytest.raises(ValueError, match="max_logit_rows"):
        BudgetLimits(max_logit_rows=0)


def test_survivals_are_corrected_and_stay_probabilities() -> None:
    confidences = np.array([[0.9, 0.5, 0.5]], np.float32)
    decision = choose_budget(
        confidences,
        np.array([3]),
        np.array([1]),
        np.array([True]),
        flat(),
        0.0,
        BudgetLimits(max_logit_rows=8),
        BudgetPolicy(),
        acceptance_ratio=1.5,
    )
    # 0.9, 0.45 and 0.225 times 1.5, the first cut off at 1.
    assert decision.predicted_tokens == pytest.approx(1 + 1.0 + 0.675 + 0.3375)


def test_beside_a_long_prompt_chunk_drafts_are_worth_what_decoding_them_would_take():
    """Two requests decode beside 62 prompt tokens; each decodes at 1 ms a step, and the drafter takes 1.5 ms."""
    verify = {n: 1.0 if n <= 2 else n / 2 for n in (1, 2, 8, 64, 128)}
    curves = CostCurves(context_len=0, verify=verify, draft={2: 1.5})
    cost = CostTable([curves], max_tokens=128, max_requests=3)
    decision = choose_budget(
        np.full((3, 1), 0.5, np.float32),
        np.array([1, 1, 0]),
        np.array([1, 1, 60]),
        np.array([True, True, False]),
        cost,
        0.0,
        BudgetLimits(max_logit_rows=64),
        BudgetPolicy(hysteresis=0.0),
    )
    assert decision.budget == 2
    assert decision.predicted_tokens == pytest.approx(3.0)
    # One token more for 1.5 ms, which ordinary decoding makes in half a millisecond.
    assert decision.tokens_per_ms > 1.4 * decision.num_sampling / decision.plain_ms
    assert decision.decode_ms == pytest.approx(1.0)
    assert decision.gain == pytest.approx(0.5 - 1.5)


@pytest.mark.parametrize(("prompt_cost", "budget"), [("shared", 2), ("sunk", 0)])
def test_a_prompt_makes_drafts_look_cheap_unless_its_cost_is_sunk(prompt_cost, budget):
    """1 ms per token: a draft that is accepted nine times in ten is not worth decoding it."""
    cost = staircase({n: float(n) for n in range(1, 33)})
    decision = choose(
        [[0.9, 0.5, 0.2], [1.0, 1.0, 1.0]],
        cost,
        draft_lens=[3, 0],
        query_lens=[1, 9],
        samples=[True, False],
        policy=BudgetPolicy(hysteresis=0.0, prompt_cost=prompt_cost),
    )
    # shared: 1/10, 1.9/11, 2.35/12 = .196, 2.44/13 = .188; sunk: 1/1, 1.9/2, 2.35/3, 2.44/4
    assert decision.budget == budget
    assert decision.predicted_ms == pytest.approx(10.0 + budget)


@given(confidence_rows, edges)
def test_without_prompts_nobody_has_to_pay_for_them(confidences, verify):
    cost = staircase(verify, {1: 0.5}, max_tokens=64)
    shared, sunk = (
        choose(confidences, cost, policy=BudgetPolicy(prompt_cost=prompt_cost))
        for prompt_cost in ("shared", "sunk")
    )
    assert shared == sunk


def test_offered_drafts_may_exceed_what_a_step_holds_if_the_limit_says_so():
    decision = choose(np.ones((2, 7)), staircase({8: 1.0}), max_logit_rows=8)
    assert (decision.budget, decision.num_draft_tokens) == (6, 14)
