"""Sizing from stale confidences is exact; sizing from the pending proposal is not.

The example is that of the DSpark paper (appendix A), with numbers: one request, two drafts, the
first drawn from q = (0.7, 0.3) where the target says p = (0.5, 0.5), so that its confidence is 0.8.
After token A the second draft is nearly sure (0.9), after B hopeless (0).
"""

import numpy as np
import pytest

from dspark_jax.budget import (
    BudgetLimits,
    BudgetPolicy,
    ConfidenceSnapshots,
    CostCurves,
    CostTable,
    allocate,
    choose_budget,
)

DRAFT = np.array([0.7, 0.3])
TARGET = np.array([0.5, 0.5])
AFTER = {0: [0.8, 0.9], 1: [0.8, 0.0]}
COST = CostTable(
    [CostCurves(context_len=0, verify={1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}, draft={1: 0.0})],
    max_tokens=3,
    max_requests=1,
)


def first_token_distribution(read):
    """Exact distribution of the first emitted token; `read` says what a step is sized with."""
    emitted = np.zeros(2)
    for token, probability in enumerate(DRAFT):
        fresh = np.array([AFTER[token]], dtype=np.float32)
        budget = choose_budget(
            read(fresh),
            np.array([2]),
            np.array([1]),
            np.array([True]),
            COST,
            0.0,
            BudgetLimits(max_logit_rows=10),
            BudgetPolicy(hysteresis=0.0),
        ).budget
        if allocate(fresh, np.array([2]), budget)[0] == 0:
            emitted += probability * TARGET
            continue
        accepted = min(1.0, TARGET[token] / DRAFT[token])
        residual = np.maximum(TARGET - DRAFT, 0.0)
        emitted[token] += probability * accepted
        emitted += probability * (1.0 - accepted) * residual / residual.sum()
    return emitted


def test_sizing_from_the_pending_proposal_would_be_biased():
    assert first_token_distribution(lambda fresh: fresh)[0] == pytest.approx(0.65)


@pytest.mark.parametrize("past", [None, [0.8, 0.9], [0.8, 0.0], [0.1, 0.1]])
def test_snapshots_keep_the_distribution(past):
    def read(fresh):
        snapshots = ConfidenceSnapshots(1, 2)
        if past is not None:
            snapshots.record(np.array([0]), np.array([4]), np.array([past], dtype=np.float32))
        # The copy of the pending proposal has already landed: the worst case.
        snapshots.record(np.array([0]), np.array([5]), fresh)
        return snapshots.read(np.array([0]), np.array([5]))

    np.testing.assert_allclose(first_token_distribution(read), TARGET, atol=1e-12)
