"""In which order the shapes of a profile are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dspark_jax.budget import ProfileSample, ProfileShape
from dspark_jax.serving import profiler
from dspark_jax.serving.profiler import ProfileSettings, build_cost_table


def test_a_burst_of_other_load_does_not_spoil_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs in a row take ten times as long, which is more than half of a shape's five."""
    num_runs = 0

    def sample(executor: Any, shape: ProfileShape, context_len: int) -> ProfileSample:
        nonlocal num_runs
        slowness = 10.0 if 5 <= num_runs < 8 else 1.0
        num_runs += 1
        return ProfileSample(
            num_tokens=shape.num_tokens,
            num_requests=shape.num_requests,
            verify_ms=slowness * shape.num_tokens,
            draft_ms=slowness,
            is_captured=True,
        )

    monkeypatch.setattr(profiler, "_sample", sample)
    monkeypatch.setattr(profiler, "_key", lambda executor, settings: {})
    executor: Any = SimpleNamespace(
        buckets=(1, 2, 4), num_slots=2, draft_len=1, fresh_state=lambda: None
    )
    settings = ProfileSettings(
        context_lens=(16,), capture_limit=4, correct_live=False, cache_file=None, flags={}
    )
    table = build_cost_table(executor, settings)
    assert num_runs == 15
    times = [table.step_ms(n, 1, draft=False, context_len=16.0) for n in (1, 2, 4)]
    assert times == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("device_ms", "launch_ms", "expected_ms"),
    [(8.0, 2.0, 8.0), (2.0, 8.0, 8.0)],
    ids=["device", "host"],
)
def test_a_step_takes_as_long_as_the_slower_of_host_and_device(
    device_ms: float, launch_ms: float, expected_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs queue up on the device, and launching them takes the host's time."""
    now = idle_at = 0.0

    def launch() -> float:
        nonlocal now, idle_at
        now += launch_ms / 1e3
        idle_at = max(idle_at, now) + device_ms / 1e3
        return idle_at

    def wait(end: float) -> None:
        nonlocal now
        now = max(now, end)

    monkeypatch.setattr(profiler, "jax", SimpleNamespace(block_until_ready=wait))
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: now))

    def prepare() -> None:
        nonlocal now
        now += 0.001

    assert profiler._time_ms(prepare, launch) == pytest.approx(expected_ms)
