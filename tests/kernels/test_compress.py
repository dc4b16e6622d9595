"""`compress`: the interpreted kernel against the reference, on poisoned inputs."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.kernels.compress import compress
from dspark_jax.kernels.compress.cases import TEST_CASES, Case, make
from dspark_jax.kernels.dispatch import Backend, Dispatch
from tests.parity.compare import FLOAT32_OP, assert_close
from tests.seeds import fresh_seed


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
def test_against_reference(case: Case) -> None:
    arguments = make(case, fresh_seed())
    used = np.asarray(arguments["closing"]) < arguments["step_rows"].shape[0]
    expected = np.asarray(compress(**arguments, dispatch=Dispatch()))
    out = np.asarray(compress(**arguments, dispatch=Dispatch(Backend.PALLAS, interpret=True)))
    assert np.isfinite(out).all()
    assert_close(out[used], expected[used], FLOAT32_OP, case.name)
