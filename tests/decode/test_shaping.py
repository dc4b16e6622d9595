"""Penalties, filters and temperature: the exact distribution, against its definition in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decode.row_layout import MAX_STOP_IDS
from dspark_jax.decode.sampling import SamplingRows
from dspark_jax.decode.shaping import only_the_best, shaped_logits
from dspark_jax.decode.state import TokenCounts
from tests.decode.shaping_reference import sampling_probs
from tests.parity.compare import Tolerance, assert_close

VOCAB = 12
ROWS = 8
PROBABILITY = Tolerance(2e-6, 1e-5, 1e-9)

parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
        "top_k": st.sampled_from([0, 0, 1, 3, VOCAB, 100]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.4]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    }
)
rows_of_parameters = st.lists(parameters, min_size=ROWS, max_size=ROWS)


def to_rows(sampling: list[dict], min_len: np.ndarray, stop_ids: np.ndarray) -> SamplingRows:
    names = sampling[0].keys()
    integers = {"top_k": jnp.int32}
    return SamplingRows(
        **{n: jnp.array([row[n] for row in sampling], integers.get(n, jnp.float32)) for n in names},
        seed=jnp.zeros((ROWS, 2), jnp.uint32),
        min_len=jnp.asarray(min_len, jnp.int32),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
    )


shape = jax.jit(shaped_logits)


@settings(max_examples=60)
@given(rows_of_parameters, st.integers(0, 2**32 - 1))
def test_distribution_equals_its_definition(sampling, seed):
    """Rows with every mixture of parameters at once, drafted tokens counted as output, stop ids held back."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    slots = rng.permutation(ROWS)
    output = rng.integers(0, 3, (ROWS, VOCAB)) * (rng.random((ROWS, VOCAB)) < 0.3)
    prompt = rng.random((ROWS, VOCAB)) < 0.3
    drafted = np.where(rng.random((ROWS, 3)) < 0.5, rng.integers(0, VOCAB, (ROWS, 3)), -1)
    positions, min_len = np.full(ROWS, 20), rng.integers(18, 23, ROWS)
    stop_ids = np.full((ROWS, MAX_STOP_IDS), -1)
    stop_ids[:, :2] = rng.integers(0, VOCAB, (ROWS, 2))
    counts = TokenCounts(
        output=jnp.zeros((ROWS, VOCAB), jnp.int32).at[slots].set(output),
        prompt=jnp.zeros((ROWS, VOCAB), bool).at[slots].set(prompt),
    )
    shaped = shape(
        jnp.asarray(raw),
        to_rows(sampling, min_len, stop_ids),
        jnp.asarray(positions),
        jnp.asarray(slots),
        counts,
        jnp.asarray(drafted),
    )
    for i, row in enumerate(sampling):
        tokens = [t for t in range(VOCAB) for _ in range(output[i, t])]
        expected = sampling_probs(
            raw[i],
            output=tokens + [t for t in drafted[i] if t >= 0],
            prompt=np.flatnonzero(prompt[i]),
            forbidden=stop_ids[i, :2] if positions[i] < min_len[i] else (),
            **row,
        )
        given_row = only_the_best(shaped[i : i + 1])[0] if row["temperature"] == 0 else shaped[i]
        assert_close(jax.nn.softmax(given_row), expected, PROBABILITY, f"row {i}, {row}")


def test_tied_tokens_stay_together():
    raw = np.array([[3.0, 3.0, 1.0, 1.0] + [-5.0] * 8] * ROWS, np.float32)
    sampling = [
        {
            "temperature": 1.0,
            "top_k": k,
            "top_p": p,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
        for k, p in [
            (1, 1.0),
            (3, 1.0),
            (0, 0.3),
            (0, 0.9),
            (2, 0.1),
            (0, 1.0),
            (4, 0.5),
            (1, 0.01),
        ]
    ]
    rows = to_rows(sampling, np.zeros(ROWS), np.full((ROWS, MAX_STOP_IDS), -1))
    counts = TokenCounts(
        output=jnp.zeros((ROWS, VOCAB), jnp.int32), prompt=jnp.zeros((ROWS, VOCAB), bool)
    )
    shaped = shape(
        jnp.asarray(raw),
        rows,
        jnp.zeros(ROWS, int),
        jnp.arange(ROWS),
        counts,
        jnp.full((ROWS, 3), -1),
    )
    kept = (np.asarray(jax.nn.softmax(shaped)) > 0).sum(axis=1).tolist()
    assert kept == [2, 4, 2, 4, 2, VOCAB, 2, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_are_shaped_each_for_itself(temperature):
    """A row's distribution is the same whatever parameters its neighbours bring."""
    plain = {
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    busy = {**plain, "temperature": 0.5, "top_k": 2, "top_p": 0.7, "frequency_penalty": 1.0}
    rng = np.random.default_rng(0)
    raw = jnp.asarray(rng.normal(0, 2, (ROWS, VOCAB)), jnp.float32)
    counts = TokenCounts(
        output=jnp.ones((ROWS, VOCAB), jnp.int32), prompt=jnp.ones((ROWS, VOCAB), bool)
    )

    def of(sampling):
        rows = to_rows(sampling, np.zeros(ROWS), np.full((ROWS, MAX_STOP_IDS), -1))
        place = jnp.zeros(ROWS, int)
        return shape(raw, rows, place, jnp.arange(ROWS), counts, jnp.full((ROWS, 3), -1))

    mixed = of([plain, busy] * (ROWS // 2))
    np.testing.assert_array_equal(mixed[::2], of([plain] * ROWS)[::2])
    np.testing.assert_array_equal(mixed[1::2], of([busy] * ROWS)[1::2])
