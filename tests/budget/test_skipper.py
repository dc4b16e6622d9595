"""Turning the drafter off and on again."""

import pytest

from dspark_jax.budget import BudgetDecision, DraftMode, DraftSkipper

DRAFT, PROBE, SKIP = DraftMode.DRAFT, DraftMode.PROBE, DraftMode.SKIP


def decision(*, gain=0.0, num_sampling=10, num_draft_tokens=448):
    """A step whose budget is predicted to be faster than ordinary decoding by the fraction `gain`."""
    return BudgetDecision(
        budget=0,
        num_tokens=64,
        num_query_tokens=64,
        num_draft_tokens=num_draft_tokens,
        num_sampling=num_sampling,
        predicted_ms=1.0 - gain,
        predicted_tokens=float(num_sampling),
        plain_ms=1.0,
        decode_ms=1.0,
        num_sanitised=0,
    )


def losing(**kwargs):
    return decision(gain=-0.1, **kwargs)


def winning(**kwargs):
    return decision(gain=0.1, **kwargs)


def undrafted(**kwargs):
    return decision(num_draft_tokens=0, **kwargs)


def modes(skipper, decisions):
    return [skipper.update(d) for d in decisions]


def test_stops_when_the_mean_of_its_memory_loses():
    # From a gain of 0.1, the mean of a memory of 8 after k losses of 0.1 is 0.2 (7/8)^k - 0.1: -0.010 after six,
    # -0.022 after seven.
    skipper = DraftSkipper(memory=8, margin=0.02)
    assert modes(skipper, [losing()] * 8) == [DRAFT] * 6 + [SKIP] * 2
    assert skipper.num_skipped == 2


def test_a_bad_start_does_not_stop_what_pays():
    """Two of the first decisions verify nothing of dear drafts, as they can by chance, and the rest win."""
    skipper = DraftSkipper()
    assert SKIP not in modes(skipper, [decision(gain=-0.7)] * 2 + [winning()] * 20)


def test_few_large_gains_outweigh_many_small_losses() -> None:
    """One request: three of four decisions lose a tenth, the fourth gains half; 0.05 on average."""
    turn = [losing(num_sampling=1)] * 3 + [decision(gain=0.5, num_sampling=1)]
    assert SKIP not in modes(DraftSkipper(), turn * 50)


def test_a_decision_for_one_request_tells_less() -> None:
    skipper = DraftSkipper(memory=8, margin=0.02)
    assert modes(skipper, [losing(num_sampling=4)] * 8).count(DRAFT) == 6
    skipper = DraftSkipper(memory=8, margin=0.02)
    # A memory of 32: 0.2 (31/32)^k - 0.1 is below -0.02 after 29 losses.
    assert modes(skipper, [losing(num_sampling=1)] * 40).count(DRAFT) == 28


def test_wins_now_and_then_do_not_keep_it_going():
    # Two losses of 0.1 for every win of 0.1: a loss of 0.033 on average, and never many in a row.
    skipper = DraftSkipper(memory=8, margin=0.02)
    assert SKIP in modes(skipper, [winning(), losing(), losing()] * 20)
    skipper = DraftSkipper(memory=8, margin=0.02)
    assert SKIP not in modes(skipper, [losing(), winning(), winning()] * 20)


def test_steps_without_drafts_are_no_evidence():
    skipper = DraftSkipper(memory=8, margin=0.02)
    assert modes(skipper, [losing()] * 6 + [undrafted()] * 5) == [DRAFT] * 11
    assert skipper.update(losing()) is SKIP


def test_a_mean_within_the_margin_is_not_losing():
    skipper = DraftSkipper(memory=1, margin=0.05)
    assert skipper.update(decision(gain=-0.04)) is DRAFT
    assert skipper.update(decision(gain=-0.06)) is SKIP


def test_believed_drafts_of_new_requests_do_not_drown_the_rest():
    # A gain of 500 % counts as 32 % for ten requests: one such step delays the end by a few steps, not by dozens.
    skipper = DraftSkipper(memory=8, margin=0.02)
    seen = modes(skipper, [decision(gain=5.0)] + [losing()] * 14)
    assert seen[:3] == [DRAFT] * 3
    assert seen[-1] is SKIP


def test_probe_that_loses_doubles_the_interval():
    skipper = DraftSkipper(memory=1, probe_interval=2, max_probe_interval=4, probe_len=2)
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


def test_probe_that_turns_the_mean_resumes_and_resets_the_interval():
    skipper = DraftSkipper(memory=1, probe_interval=2, probe_len=2)
    assert modes(skipper, [losing(), undrafted(), undrafted()]) == [SKIP, SKIP, PROBE]
    assert modes(skipper, [losing(), losing()]) == [PROBE, SKIP]  # now the interval is 4
    assert modes(skipper, [undrafted()] * 4) == [SKIP] * 3 + [PROBE]
    assert modes(skipper, [winning(), winning()]) == [PROBE, DRAFT]
    assert modes(skipper, [losing(), undrafted(), undrafted()]) == [SKIP, SKIP, PROBE]


def test_one_lucky_probe_does_not_outweigh_many_losses():
    skipper = DraftSkipper(memory=8, margin=0.02, probe_interval=1, probe_len=1)
    while skipper.update(decision(gain=-0.2)) is not SKIP:
        pass
    # The mean is -0.025; a quarter of 0.05 does not lift it above 0, a quarter of 0.2 does.
    assert modes(skipper, [undrafted(), decision(gain=0.05)]) == [PROBE, SKIP]
    assert modes(skipper, [undrafted(), undrafted(), decision(gain=0.2)]) == [SKIP, PROBE, DRAFT]


def test_confidences_during_a_probe_are_not_believed():
    # The second probe step reads 1.0 everywhere and would always look winning.
    skipper = DraftSkipper(memory=1, probe_interval=1, probe_len=3)
    skipper.update(losing())
    assert modes(skipper, [undrafted(), winning(), winning(), losing()]) == [
        PROBE,
        PROBE,
        PROBE,
        SKIP,
    ]


def test_probe_waits_for_drafts_to_judge():
    skipper = DraftSkipper(memory=1, probe_interval=1, probe_len=1)
    skipper.update(losing())
    assert modes(skipper, [undrafted(), undrafted(), winning()]) == [PROBE, PROBE, DRAFT]


def test_a_smaller_load_that_is_new_is_tried_at_once() -> None:
    skipper = DraftSkipper(memory=1, probe_interval=100, probe_len=1)
    assert modes(skipper, [losing(num_sampling=64)]) == [SKIP]
    assert skipper.update(undrafted(num_sampling=65)) is SKIP
    # A step of prompts alone samples nothing; that is no sign of a smaller load.
    assert skipper.update(undrafted(num_sampling=0)) is SKIP
    assert skipper.update(undrafted(num_sampling=63)) is PROBE
    assert skipper.update(decision(gain=0.01, num_sampling=63)) is DRAFT
    # What the larger load has taught is not forgotten, nor what the smaller one has.
    assert skipper.update(losing(num_sampling=64)) is SKIP
    assert skipper.update(undrafted(num_sampling=63)) is PROBE
    assert skipper.update(decision(gain=0.01, num_sampling=63)) is DRAFT


def test_a_batch_that_shrinks_for_a_moment_learns_once() -> None:
    skipper = DraftSkipper(memory=1, probe_interval=1000, max_probe_interval=1000, probe_len=1)
    assert skipper.update(losing(num_sampling=8)) is SKIP
    seen = []
    for _ in range(20):
        seen += modes(skipper, [undrafted(num_sampling=8)] * 5)
        for _ in range(2):
            has_drafts = skipper.mode is PROBE
            seen.append(
                skipper.update(losing(num_sampling=4) if has_drafts else undrafted(num_sampling=4))
            )
    assert seen.count(PROBE) == 1
    assert seen.count(DRAFT) == 0


def test_a_larger_load_takes_over_the_rest() -> None:
    skipper = DraftSkipper(memory=1, probe_interval=10, probe_len=1)
    assert skipper.update(decision(gain=-1.0, num_sampling=1)) is SKIP
    assert modes(skipper, [undrafted(num_sampling=2)] * 9) == [SKIP] * 9
    assert skipper.update(undrafted(num_sampling=2)) is PROBE


def test_probes_that_never_win_cost_little() -> None:
    """Of steps of 1 ms and a drafter of 1 ms: under 3 % from the first 500 steps on."""
    skipper = DraftSkipper()
    while skipper.update(losing()) is not SKIP:
        pass
    drafted = 0
    for step in range(1, 20_000):
        mode = skipper.update(losing() if skipper.mode is PROBE else undrafted())
        assert mode is not DRAFT
        drafted += mode is PROBE
        assert step < 500 or drafted <= 0.03 * step
    assert 0 < drafted < 100


@pytest.mark.parametrize(
    "arguments",
    [
        {"memory": 0},
        {"probe_len": 0},
        {"probe_interval": 8, "max_probe_interval": 4},
        {"margin": -0.1},
    ],
)
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError):
        DraftSkipper(**arguments)
