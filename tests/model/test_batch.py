"""The flat layout of a step's tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.budget import step_layout
from dspark_jax.model.batch import batch_from_chunks, layout
from dspark_jax.model.cache import kept_tokens

TOKENS = 16
ROWS = 5
laid_out = partial(jax.jit, static_argnums=0)(layout)
kept_and_behind = jax.jit(kept_tokens)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS).filter(lambda q: sum(q) <= TOKENS))
def test_rows_lie_one_behind_the_other(q_lens):
    """Empty rows own nothing, and what is left over belongs to no row."""
    q_lens = np.array(q_lens, np.int32)
    starts = np.arange(ROWS, dtype=np.int32) * 100
    batch, within = laid_out(TOKENS, jnp.arange(ROWS)[::-1], starts, q_lens)
    rows = np.repeat(np.arange(ROWS), q_lens)
    offsets = np.concatenate([np.arange(n) for n in q_lens])
    padding = TOKENS - len(rows)
    np.testing.assert_array_equal(batch.seq_ids, np.pad(rows, (0, padding), constant_values=-1))
    np.testing.assert_array_equal(within, np.pad(offsets, (0, padding)))
    np.testing.assert_array_equal(batch.positions, np.pad(starts[rows] + offsets, (0, padding)))
    np.testing.assert_array_equal(batch.cu_q_lens, step_layout(q_lens, 0 * q_lens).cu_q_lens)
    np.testing.assert_array_equal(batch.token_slots[: len(rows)], ROWS - 1 - rows)
    np.testing.assert_array_equal(batch.token_starts[: len(rows)], starts[rows])
    np.testing.assert_array_equal(batch.row_heads[: len(rows)], batch.cu_q_lens[rows])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=ROWS, max_size=ROWS))
def test_kept_tokens_are_the_first_of_their_row(pairs):
    q_lens = np.array([max(pair) for pair in pairs], np.int32)
    accepted = np.array([min(pair) for pair in pairs], np.int32)
    batch, within = laid_out(TOKENS, jnp.arange(ROWS), jnp.full(ROWS, 7), q_lens)
    kept, behind = kept_and_behind(batch, accepted)
    rows = np.repeat(np.arange(ROWS), q_lens)
    within = np.asarray(within)[: len(rows)]
    expected = within < accepted[rows]
    np.testing.assert_array_equal(kept, np.pad(expected, (0, TOKENS - len(rows))))
    left = accepted[rows] - 1 - within
    np.testing.assert_array_equal(np.asarray(behind)[: len(rows)][expected], left[expected])


def test_chunks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="17 tokens do not fit a bucket of 16"):
        batch_from_chunks([(0, 0, np.zeros(9)), (1, 0, np.zeros(8))], token_count=16, rows=2)
