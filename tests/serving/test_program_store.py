"""Programs on disk run after a restart, whatever JAX keeps in its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from dspark_jax.serving.program_store import ProgramStore, without_jax_cache

ARGUMENT = jax.ShapeDtypeStruct((64,), jnp.float32)


@pytest.fixture
def jax_cache(tmp_path: Path):
    """A cache of JAX's own that takes everything."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def ranks(x: jax.Array) -> jax.Array:
    return jnp.sum(x[:, None] < x, axis=0)


def load_or_compile(folder: Path):
    jax.clear_caches()
    return ProgramStore(folder).load_or_compile(
        "ranks", (ARGUMENT,), 0, lambda: jax.jit(ranks).lower(ARGUMENT).compile()
    )


def test_a_stored_program_runs_though_jax_had_it_in_its_cache(jax_cache, tmp_path):
    jax.jit(ranks).lower(ARGUMENT).compile()
    assert list(jax_cache.iterdir()), "JAX kept nothing, and the test shows nothing"
    with without_jax_cache():
        load_or_compile(tmp_path / "programs")
    config: Any = jax.config
    assert config.jax_enable_compilation_cache
    again = load_or_compile(tmp_path / "programs")
    x = np.random.default_rng(0).permutation(64).astype(np.float32)
    np.testing.assert_array_equal(again(x), x)
