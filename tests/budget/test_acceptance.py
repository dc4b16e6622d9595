"""The ratio accepted / promised against hand-counted verdicts."""

import pytest

from dspark_jax.budget import AcceptanceCorrection


def test_starts_at_one_and_adds_what_steps_promised_and_got() -> None:
    correction = AcceptanceCorrection(half_life=1e12, prior=1.0)
    assert correction.ratio == 1.0
    correction.observe(1.25, 2.0, 2)
    assert correction.ratio == pytest.approx(3.0 / 2.25)


def test_nothing_verified_or_promised_teaches_nothing() -> None:
    correction = AcceptanceCorrection(half_life=1.0)
    correction.observe(0.9, 0.0, 0)
    correction.observe(0.0, 1.0, 3)
    assert correction.ratio == 1.0


def test_old_verdicts_fade_and_the_ratio_stays_within_its_bounds() -> None:
    correction = AcceptanceCorrection(half_life=10.0, min_ratio=0.8, max_ratio=1.5)
    for _ in range(20):
        correction.observe(2.5, 10.0, 10)
    assert correction.ratio == 1.5
    for _ in range(20):
        correction.observe(2.5, 0.0, 10)
    assert correction.ratio == 0.8


@pytest.mark.parametrize(
    "arguments",
    [
        {"half_life": 0.0},
        {"prior": 0.0},
        {"min_ratio": 0.0},
        {"min_ratio": 1.1},
        {"max_ratio": 0.9},
    ],
)
def test_refuses_nonsense(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        AcceptanceCorrection(**arguments)
