"""`sparse_mla`: the interpreted kernel against the reference, on poisoned inputs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.sparse_mla import sparse_mla
from dspark_jax.kernels.sparse_mla.cases import TEST_CASES, Case, make
from dspark_jax.kernels.sparse_mla.pallas_triton import Tile, default_tile, sparse_mla_pallas
from tests.parity.compare import BFLOAT16_OP, FLOAT32_OP, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
def test_default_tile(case: Case) -> None:
    arguments = make(case, fresh_seed(), jnp.float32)
    expected = sparse_mla(**arguments, dispatch=Dispatch())
    assert np.isfinite(np.asarray(expected)).all()
    assert_close(sparse_mla(**arguments, dispatch=INTERPRETED), expected, FLOAT32_OP, case.name)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_and_splits(splits: int) -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.float32)
    tile = Tile(heads=16, keys=16, step_keys=16, part=16, splits=splits, warps=4, stages=1)
    out = sparse_mla_pallas(**arguments, dispatch=INTERPRETED, tile=tile)
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), FLOAT32_OP)


def test_bfloat16_rows() -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.bfloat16)
    out = sparse_mla(**arguments, dispatch=INTERPRETED)
    assert out.dtype == jnp.bfloat16
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), BFLOAT16_OP)


def test_few_tokens_are_split_and_many_are_not() -> None:
    sizes = {"heads": 64, "width": 512, "rows": 640, "itemsize": 2, "capability": 90}
    splits = [default_tile(tokens=tokens, **sizes).splits for tokens in (1, 16, 64, 256, 2048)]
    assert splits == [10, 5, 2, 1, 1]
