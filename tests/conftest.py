"""The device, the cache of compiled programs, and what is skipped on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

HAS_GPU = shutil.which("nvidia-smi") is not None

# Before JAX is imported anywhere, and inherited by servers that tests start. JAX keys entries by program,
# compiler, options and machine: after a change of any of them a stale entry cannot be hit.
if not HAS_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_USER_CACHE / "dspark_jax" / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

# The models are tiny, and two test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machines that run the tests are shared: a slow example says nothing about the code.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))
