"""`jax.jit` for programs that a test compiles for a few runs: less optimisation, half the compile time."""

from __future__ import annotations

from functools import partial

import jax

quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
