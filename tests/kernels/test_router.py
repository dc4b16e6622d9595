"""`route`: the interpreted kernel against the reference, and what both promise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.router import route
from dspark_jax.kernels.router.cases import TEST_CASES, Case, make
from dspark_jax.kernels.router.pallas_triton import Tile, route_pallas
from tests.parity.compare import FLOAT32_OP, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)
backends = pytest.mark.parametrize(
    "dispatch", [Dispatch(), INTERPRETED], ids=["reference", "interpreted"]
)


@pytest.mark.parametrize("case", TEST_CASES, ids=lambda case: case.name)
def test_against_reference(case: Case) -> None:
    arguments = make(case, fresh_seed())
    expert_ids, weights = route(**arguments, dispatch=INTERPRETED)
    expected_ids, expected_weights = route(**arguments, dispatch=Dispatch())
    assert expert_ids.dtype == jnp.int32
    np.testing.assert_array_equal(expert_ids, expected_ids)
    assert_close(weights, expected_weights, FLOAT32_OP, case.name)


@pytest.mark.parametrize("tokens", [2, 4])
def test_tokens_may_share_a_program(tokens: int) -> None:
    arguments = make(Case("", 11, 16, 3, layer=1, hashed=True, padding=3), fresh_seed())
    expected_ids, expected_weights = route(**arguments, dispatch=Dispatch())
    expert_ids, weights = route_pallas(**arguments, dispatch=INTERPRETED, tile=Tile(tokens, 1))
    np.testing.assert_array_equal(expert_ids, expected_ids)
    assert_close(weights, expected_weights, FLOAT32_OP)


def one_token(logits: Any, bias: Any, k: int, dispatch: Dispatch) -> tuple[list[int], np.ndarray]:
    """Choice and weights, which sum to 1, of one token."""
    expert_ids, weights = route(
        jnp.asarray([logits], jnp.float32),
        jnp.asarray([bias], jnp.float32),
        layer=0,
        k=k,
        scale=1.0,
        is_token=jnp.ones(1, bool),
        dispatch=dispatch,
    )
    return np.asarray(expert_ids)[0].tolist(), np.asarray(weights)[0]


@backends
def test_equals_come_lowest_number_first(dispatch: Dispatch) -> None:
    """The highest sum first; among equal sums the number decides, whatever they are made of."""
    logits, bias = [1.0, 2.0, 1.0, 2.0, 3.0, 2.0], [0.0] * 6
    assert one_token(logits, bias, 6, dispatch)[0] == [4, 1, 3, 5, 0, 2]
    # The score of a logit this low is zero, so the bias is the whole sum.
    assert one_token([-200.0] * 5, [0.5, 1.0, 0.5, 1.0, 0.5], 3, dispatch)[0] == [1, 3, 0]


@backends
def test_the_bias_selects_and_does_not_weight(dispatch: Dispatch) -> None:
    expert_ids, weights = one_token([0.0, 1.0, -1.0, 0.5], [0.0, -9.0, 9.0, 1.0], 2, dispatch)
    assert expert_ids == [2, 3]
    scores = np.sqrt(np.log1p(np.exp([-1.0, 0.5])))
    np.testing.assert_allclose(weights, scores / scores.sum(), rtol=1e-5)


@backends
def test_far_logits(dispatch: Dispatch) -> None:
    """softplus(x) is x above and exp(x) below; a token whose scores are all zero gets weights of zero."""
    expert_ids, weights = one_token([1e8, -20.0, 1e4, -3e38], [0.0] * 4, 3, dispatch)
    assert expert_ids == [0, 2, 1]
    scores = np.sqrt([1e8, 1e4, np.exp(-20.0)])
    np.testing.assert_allclose(weights, scores / scores.sum(), rtol=1e-5)
    assert one_token([-200.0] * 4, [0.0] * 4, 3, dispatch)[1].tolist() == [0.0, 0.0, 0.0]


@backends
def test_nan_stays_in_its_row(dispatch: Dispatch) -> None:
    """Its own choice is still one of k experts, none twice."""
    case = Case("", 9, 16, 3)
    arguments = make(case, fresh_seed())
    clean_ids, clean_weights = route(**arguments, dispatch=dispatch)
    logits = arguments["logits"].at[2].set(jnp.nan).at[6, 5].set(-jnp.nan)
    expert_ids, weights = route(**arguments | {"logits": logits}, dispatch=dispatch)
    others = np.array([0, 1, 3, 4, 5, 7, 8])
    np.testing.assert_array_equal(expert_ids[others], clean_ids[others])
    np.testing.assert_array_equal(weights[others], clean_weights[others])
    for row in (2, 6):
        chosen = np.asarray(expert_ids[row])
        assert len(set(chosen.tolist())) == case.k
        assert ((chosen >= 0) & (chosen < case.experts)).all()


@backends
def test_padding_goes_nowhere(dispatch: Dispatch) -> None:
    """Its logits, which are NaN here, do not reach its weights."""
    case = Case("", 7, 16, 3, layer=0, hashed=True, padding=2)
    expert_ids, weights = route(**make(case, fresh_seed()), dispatch=dispatch)
    assert (np.asarray(expert_ids)[-2:] == case.experts).all()
    assert (np.asarray(weights)[-2:] == 0).all()
    np.testing.assert_allclose(np.asarray(weights)[:-2].sum(-1), 1.5, rtol=1e-5)


@backends
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_table_replaces_the_choice_of_the_first_layers(layer: int, dispatch: Dispatch) -> None:
    arguments = make(Case("", 8, 16, 3, layer=layer, hashed=True), fresh_seed())
    expert_ids, weights = route(**arguments, dispatch=dispatch)
    table, token_ids = arguments.pop("table"), arguments.pop("token_ids")
    free_ids, free_weights = route(**arguments, dispatch=dispatch)
    if layer == 2:
        np.testing.assert_array_equal(expert_ids, free_ids)
        np.testing.assert_array_equal(weights, free_weights)
        return
    np.testing.assert_array_equal(expert_ids, table[layer, token_ids])
    scores = np.sqrt(np.logaddexp(np.asarray(arguments["logits"]), 0))
    scores = np.take_along_axis(scores, np.asarray(expert_ids), axis=1)
    expected = 1.5 * scores / scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
