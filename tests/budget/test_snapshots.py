"""Staleness: which proposal's confidences the budget may read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.budget import (
    NO_PROPOSAL,
    BudgetLimits,
    BudgetPolicy,
    ConfidenceSnapshots,
    CostCurves,
    CostTable,
    allocate,
    choose_budget,
)

ONE = np.float32(1.0)


def rows(*values, draft_len=3):
    """One row per value, all positions equal."""
    return np.repeat(np.asarray(values, dtype=np.float32)[:, None], draft_len, axis=1)


def record(snapshots, slots, serial, *values):
    serials = np.full(len(slots), serial) if np.isscalar(serial) else np.asarray(serial)
    snapshots.record(np.asarray(slots), serials, rows(*values))


def read(snapshots, slots, pending):
    pending = np.full(len(slots), pending) if np.isscalar(pending) else np.asarray(pending)
    return snapshots.read(np.asarray(slots), pending)[:, 0].tolist()


def budget_of(confidences, cost_edge=3):
    cost = CostTable(
        [CostCurves(context_len=0, verify={cost_edge: 1.0, 16: 1.5}, draft={1: 0.0})],
        max_tokens=16,
        max_requests=4,
    )
    num_requests = confidences.shape[0]
    return choose_budget(
        confidences,
        np.full(num_requests, confidences.shape[1]),
        np.ones(num_requests, dtype=int),
        np.ones(num_requests, dtype=bool),
        cost,
        0.0,
        BudgetLimits(max_logit_rows=100),
        BudgetPolicy(),
    ).budget


def test_everything_reads_one_at_first():
    assert read(ConfidenceSnapshots(4, 3), [3, 0], [NO_PROPOSAL, 0]) == [1.0, 1.0]


@pytest.mark.parametrize("landed_early", [False, True])
def test_case_21_budget_uses_the_step_before(landed_early):
    """Pending are the proposals of step 7; whether their copy has landed doesn't matter."""

    def budget(old, new):
        snapshots = ConfidenceSnapshots(2, 3)
        record(snapshots, [0, 1], 6, *old)
        if landed_early:
            record(snapshots, [0, 1], 7, *new)
        return budget_of(snapshots.read(np.arange(2), np.array([7, 7])))

    assert budget((0.9, 0.8), (0.9, 0.2)) == 6
    assert budget((0.9, 0.8), (0.0, 0.0)) == 6
    assert budget((0.1, 0.1), (0.9, 0.2)) == 1


def test_case_21_allocation_follows_the_fresh_confidences():
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0, 1], 6, 0.4, 0.3)
    budget = budget_of(snapshots.read(np.arange(2), np.array([7, 7])), cost_edge=5)
    assert budget == 3
    assert allocate(rows(0.9, 0.2), np.array([3, 3]), budget).tolist() == [3, 0]
    assert allocate(rows(0.2, 0.9), np.array([3, 3]), budget).tolist() == [0, 3]


def test_case_22_copy_in_flight_for_the_previous_request_is_dropped():
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0, 1], 4, 0.3, 0.4)
    snapshots.admit(1, first_serial=6)
    assert read(snapshots, [0, 1], 9) == [np.float32(0.3), 1.0]
    record(snapshots, [0, 1], 5, 0.35, 0.45)
    assert read(snapshots, [0, 1], [9, 9]) == [np.float32(0.35), 1.0]
    record(snapshots, [0, 1], 6, 0.5, 0.6)
    # Both buffers: the one behind the newest must not hold the old tenant either.
    assert read(snapshots, [1], 6) == [1.0]
    assert read(snapshots, [1], 7) == [np.float32(0.6)]


def test_case_23_rows_belong_to_slots_not_to_batch_rows():
    snapshots = ConfidenceSnapshots(4, 3)
    record(snapshots, [2, 0, 3], 1, 0.2, 0.5, 0.8)
    by_slot = {0: 0.5, 2: 0.2, 3: 0.8}
    for order in ([0, 2, 3], [3, 2, 0], [2, 3, 0]):
        expected = [np.float32(by_slot[slot]) for slot in order]
        assert read(snapshots, order, 2) == expected
        fresh = rows(*(by_slot[slot] for slot in order))
        lens = allocate(fresh, np.full(3, 3), 4)
        assert dict(zip(order, lens.tolist(), strict=True)) == {0: 1, 2: 0, 3: 3}


def test_case_24_readmitted_request_is_believed_again():
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0], 3, 0.1)
    snapshots.admit(0, first_serial=5)
    record(snapshots, [0], 4, 0.2)
    assert read(snapshots, [0], NO_PROPOSAL) == [1.0]


def test_case_24_finishing_while_drafting_leaks_nothing():
    # The request in slot 1 finished in step 5, which drafted for it all the same.
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0, 1], 4, 0.9, 0.1)
    snapshots.admit(1, first_serial=6)
    record(snapshots, [0, 1], 5, 0.9, 0.05)
    assert read(snapshots, [0, 1], 8) == [np.float32(0.9), 1.0]
    # Only scheduled requests are read.
    assert snapshots.read(np.array([0]), np.array([8])).shape == (1, 3)


def test_case_25_rows_without_a_proposal_change_nothing():
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0, 1], 4, 0.3, 0.4)
    record(snapshots, [0, 1], [NO_PROPOSAL, 5], np.nan, 0.6)
    assert read(snapshots, [0, 1], 9) == [np.float32(0.3), np.float32(0.6)]
    snapshots.record(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 3), np.float32))
    assert read(snapshots, [0, 1], 9) == [np.float32(0.3), np.float32(0.6)]


def test_pending_proposal_is_never_read():
    snapshots = ConfidenceSnapshots(1, 3)
    record(snapshots, [0], 4, 0.3)
    assert read(snapshots, [0], 4) == [1.0]
    record(snapshots, [0], 5, 0.6)
    assert read(snapshots, [0], 5) == [np.float32(0.3)]
    assert read(snapshots, [0], 6) == [np.float32(0.6)]


def test_repeated_copy_of_a_kept_proposal_is_idempotent():
    snapshots = ConfidenceSnapshots(1, 3)
    record(snapshots, [0], 4, 0.3)
    record(snapshots, [0], 5, 0.6)
    record(snapshots, [0], 5, 0.6)
    assert read(snapshots, [0], 5) == [np.float32(0.3)]


def test_copies_out_of_order_are_an_error():
    snapshots = ConfidenceSnapshots(2, 3)
    record(snapshots, [0, 1], 5, 0.6, 0.6)
    with pytest.raises(ValueError, match=r"slots \[1\]"):
        record(snapshots, [0, 1], [6, 4], 0.3, 0.3)


def test_smoothing_averages_past_proposals_only():
    snapshots = ConfidenceSnapshots(1, 3, smoothing=0.8)
    record(snapshots, [0], 1, 0.5)
    assert read(snapshots, [0], 2) == [0.5]
    record(snapshots, [0], 2, 1.0)
    assert read(snapshots, [0], 3) == [pytest.approx(0.9)]
    # Pending: the average must not contain proposal 2 in any part.
    assert read(snapshots, [0], 2) == [0.5]
    snapshots.admit(0, first_serial=3)
    record(snapshots, [0], 3, 0.25)
    assert read(snapshots, [0], 4) == [0.25]


def test_smoothing_must_be_a_weight():
    with pytest.raises(ValueError, match="smoothing"):
        ConfidenceSnapshots(1, 3, smoothing=0.0)


events = st.lists(
    st.tuples(st.sampled_from(["draft", "admit", "skip"]), st.integers(0, 2)), max_size=40
)


@given(events, st.integers(0, 2), st.sampled_from([None, 0.8]))
def test_reads_only_earlier_proposals_of_the_same_request(script, delay, smoothing):
    """Confidence = serial / 64, so that what was read says which proposal it came from."""
    snapshots = ConfidenceSnapshots(3, 1, smoothing=smoothing)
    in_flight = []
    first = [0, 0, 0]
    pending = [NO_PROPOSAL] * 3
    for serial, (event, slot) in enumerate(script, start=1):
        if event == "admit":
            snapshots.admit(slot, first_serial=serial)
            first[slot], pending[slot] = serial, NO_PROPOSAL
        elif event == "draft":
            pending[slot] = serial
            in_flight.append((slot, serial))
        while len(in_flight) > delay:
            landed, its_serial = in_flight.pop(0)
            snapshots.record(
                np.array([landed]),
                np.array([its_serial]),
                np.array([[its_serial / 64]], dtype=np.float32),
            )
        for s in range(3):
            value = snapshots.read(np.array([s]), np.array([pending[s]]))[0, 0]
            if value != ONE:
                assert first[s] <= value * 64 + 1e-3
                assert pending[s] != NO_PROPOSAL
                assert value * 64 < pending[s]


def test_says_which_rows_are_believed_for_want_of_a_history():
    snapshots = ConfidenceSnapshots(3, 2)
    for slot in range(3):
        snapshots.admit(slot, 0)
    snapshots.record(np.array([0, 1]), np.array([4, 4]), np.ones((2, 2), np.float32))
    # The proposal of slot 1 is the pending one, that of slot 0 came before; slot 2 never made one.
    believed = snapshots.is_believed(np.array([0, 1, 2]), np.array([5, 4, NO_PROPOSAL]))
    assert believed.tolist() == [False, True, True]
