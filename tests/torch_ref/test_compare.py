"""The comparison itself: a comparison that cannot fail proves nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.parity.compare import EXACT, Tolerance, assert_close

LOOSE = Tolerance(0.1, 0.01, 1.0)


def test_bound_is_absolute_or_relative():
    assert_close(np.array([0.09, 1005.0]), np.array([0.0, 1000.0]), LOOSE)
    with pytest.raises(AssertionError, match=r"x: 1 of 2 .* worst at \(1,\): 1020"):
        assert_close(np.array([0.09, 1020.0]), np.array([0.0, 1000.0]), LOOSE, "x")
    with pytest.raises(AssertionError, match=r"worst at \(0,\)"):
        assert_close(np.array([0.2, 1005.0]), np.array([0.0, 1000.0]), LOOSE)


def test_special_values_must_coincide():
    special = np.array([[1.0, np.nan], [np.inf, -np.inf]])
    assert_close(special, special.copy(), EXACT)
    assert_close(np.array([np.nan]), np.array([np.nan]), EXACT)
    for place, value in [((0, 1), 1.0), ((1, 0), -np.inf), ((1, 1), 0.0), ((0, 0), np.nan)]:
        changed = special.copy()
        changed[place] = value
        for pair in [(changed, special), (special, changed)]:
            with pytest.raises(AssertionError, match=rf"first at \({place[0]}, {place[1]}\)"):
                assert_close(*pair, LOOSE)


def test_shape_must_be_equal():
    with pytest.raises(AssertionError, match=r"shape \(1, 2\), expected \(2,\)"):
        assert_close(np.zeros((1, 2)), np.zeros(2), LOOSE)


def test_cosine_gap_catches_what_the_bound_lets_through():
    tight = Tolerance(0.1, 0.0, 1e-4)
    expected = np.full(100, 0.2)
    assert_close(expected * 1.01, expected, tight)
    with pytest.raises(AssertionError, match="cosine gap"):
        assert_close(expected + 0.09 * (np.arange(100) % 2), expected, tight)
    with pytest.raises(AssertionError, match="cosine gap 1 "):
        assert_close(np.full(3, 0.01), np.zeros(3), tight)
    assert_close(np.zeros(3), np.zeros(3), tight)


def test_frameworks_and_low_precision_types_mix():
    values = [1.0, -2.5, 0.125]
    bfloat16 = np.array(values, dtype=ml_dtypes.bfloat16)
    assert_close(torch.tensor(values, dtype=torch.bfloat16), bfloat16, EXACT)
    assert_close(bfloat16, np.array(values, dtype=np.float32), EXACT)
    assert_close(torch.zeros(0, 3), np.zeros((0, 3)), EXACT)
