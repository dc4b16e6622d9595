"""`hyper_enter` and `hyper_leave`: the interpreted kernels against the reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.hyper import hyper_enter, hyper_leave
from dspark_jax.kernels.hyper.cases import TEST_CASES, Case, make, make_output
from tests.parity.compare import BFLOAT16_OP, FLOAT32_OP, Tolerance, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
def test_against_reference(case: Case) -> None:
    seed = fresh_seed()
    arguments = make(case, seed, jnp.float32)
    expected = hyper_enter(**arguments, dispatch=Dispatch())
    out = hyper_enter(**arguments, dispatch=INTERPRETED)
    for name, actual, wanted in zip(expected._fields, out, expected):
        assert_close(actual, wanted, FLOAT32_OP, f"{case.name} {name}")
    # Twenty iterations leave columns exact and rows nearly so.
    np.testing.assert_allclose(np.asarray(out.comb).sum(-2), 1.0, atol=1e-5)
    output = make_output(case, seed, jnp.float32)
    streams = hyper_leave(
        arguments["streams"], output, expected.post, expected.comb, dispatch=Dispatch()
    )
    left = hyper_leave(
        arguments["streams"], output, expected.post, expected.comb, dispatch=INTERPRETED
    )
    assert_close(left, streams, FLOAT32_OP, case.name)


def test_bfloat16_streams_lose_nothing_in_the_mixing_weights() -> None:
    arguments = make(TEST_CASES[0], fresh_seed(), jnp.bfloat16)
    expected = hyper_enter(**arguments, dispatch=Dispatch())
    out = hyper_enter(**arguments, dispatch=INTERPRETED)
    assert_close(out.block_input, expected.block_input, BFLOAT16_OP)
    assert_close(out.post, expected.post, Tolerance(5e-5, 5e-5, 1e-8))
    assert_close(out.comb, expected.comb, Tolerance(5e-5, 5e-5, 1e-8))
