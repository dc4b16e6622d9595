"""Turning the drafter off and on again."""

import pytest

from dspark_jax.budget import BudgetDecision, DraftMode, DraftSkipper

DRAFT, PROBE, SKIP = DraftMode.DRAFT, DraftMode.PROBE, DraftMode.SKIP


def decision(*, plain_ms=1.0, predicted_ms=2.0, num_query_tokens=64, num_draft_tokens=448):
    return BudgetDecision(
        budget=0,
        num_tokens=num_query_tokens,
        num_query_tokens=num_query_tokens,
        num_draft_tokens=num_draft_tokens,
        num_sampling=10,
        predicted_ms=predicted_ms,
        predicted_tokens=10.0,
        plain_ms=plain_ms,
        num_sanitised=0,
    )


def losing(**kwargs):
    return decision(**kwargs)


def winning(**kwargs):
    return decision(predicted_ms=0.5, **kwargs)


def undrafted(**kwargs):
    return decision(num_draft_tokens=0, **kwargs)


def modes(skipper, decisions):
    return [skipper.update(d) for d in decisions]


def test_stops_after_patience_losing_steps_in_a_row():
    skipper = DraftSkipper(patience=3)
    decisions = [losing(), losing(), winning(), losing(), losing(), losing()]
    assert modes(skipper, decisions) == [DRAFT] * 5 + [SKIP]
    assert skipper.num_skipped == 1


def test_steps_without_drafts_are_no_evidence():
    skipper = DraftSkipper(patience=2)
    assert modes(skipper, [losing()] + [undrafted()] * 5) == [DRAFT] * 6
    assert skipper.update(losing()) is SKIP


def test_a_small_margin_is_not_losing():
    skipper = DraftSkipper(patience=1, margin=0.05)
    assert skipper.update(decision(plain_ms=1.0, predicted_ms=1.04)) is DRAFT
    assert skipper.update(decision(plain_ms=1.0, predicted_ms=1.06)) is SKIP


def test_probe_that_loses_doubles_the_interval():
    skipper = DraftSkipper(patience=1, probe_interval=2, max_probe_interval=4, probe_len=2)
    assert skipper.update(losing()) is SKIP
    gaps = []
    for _ in range(3):
        gap = 1
        while skipper.update(undrafted()) is SKIP:
            gap += 1
        gaps.append(gap)
        # The first probe step drafts, the second has no confidences yet, the third is judged.
        assert skipper.mode is PROBE
        assert modes(skipper, [losing(), losing()]) == [PROBE, SKIP]
    assert gaps == [2, 4, 4]


def test_probe_that_wins_resumes_and_resets():
    skipper = DraftSkipper(patience=2, probe_interval=2, probe_len=2)
    assert modes(skipper, [losing(), losing(), undrafted(), undrafted()]) == [
        DRAFT,
        SKIP,
        SKIP,
        PROBE,
    ]
    assert modes(skipper, [winning(), winning()]) == [PROBE, DRAFT]
    assert modes(skipper, [losing(), losing()]) == [DRAFT, SKIP]


def test_confidences_during_a_probe_are_not_believed():
    # The second probe step reads 1.0 everywhere and would always look winning.
    skipper = DraftSkipper(patience=1, probe_interval=1, probe_len=3)
    skipper.update(losing())
    assert modes(skipper, [undrafted(), winning(), winning(), losing()]) == [
        PROBE,
        PROBE,
        PROBE,
        SKIP,
    ]


def test_probe_waits_for_drafts_to_judge():
    skipper = DraftSkipper(patience=1, probe_interval=1, probe_len=1)
    skipper.update(losing())
    assert modes(skipper, [undrafted(), undrafted(), winning()]) == [PROBE, PROBE, DRAFT]


def test_half_the_load_probes_at_once():
    skipper = DraftSkipper(patience=1, probe_interval=100)
    skipper.update(losing(num_query_tokens=64))
    assert skipper.update(undrafted(num_query_tokens=33)) is SKIP
    assert skipper.update(undrafted(num_query_tokens=32)) is PROBE


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 0},
        {"probe_len": 0},
        {"probe_interval": 8, "max_probe_interval": 4},
        {"margin": -0.1},
    ],
)
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError):
        DraftSkipper(**arguments)
