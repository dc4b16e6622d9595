"""The table of differences, as a bound."""

from __future__ import annotations

import pytest

from tests.parity.report import lines

LARGEST = 2e-5


@pytest.mark.slow
def test_no_difference_exceeds_the_bound():
    for line in lines():
        assert line.difference <= LARGEST, line
