"""Numbered cases of adaptive verification that concern the step on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.budget import step_layout
from dspark_jax.decode.allocate import allocate
from dspark_jax.decode.plan import RowFinish
from dspark_jax.model.batch import layout
from tests.decode.conftest import NUM_TOKENS
from tests.decode.driver import SLOTS, Loop, Request, programs, random_budget
from tests.decode.model import DRAFT_LEN, model_params
from tests.seeds import fresh_seed


@pytest.mark.parametrize(("budget", "lens"), [(0, [0, 0, 0]), (2, [2, 0, 0]), (3, [2, 1, 0])])
def test_case_28_layout(budget, lens):
    """Three requests in six rows and 16 tokens, the third with five tokens of its prompt."""
    confidences = jnp.array([[0.9, 0.9], [0.5, 0.5], [0.99, 0.99]] + [[1.0, 1.0]] * 3)
    caps, query_lens = jnp.array([2, 1, 0, 0, 0, 0]), jnp.array([1, 1, 5, 0, 0, 0])

    @jax.jit
    def run(budget):
        verify_lens = allocate(confidences, caps, budget)
        batch, _ = layout(16, jnp.arange(6), jnp.zeros(6, jnp.int32), query_lens + verify_lens)
        return verify_lens, batch

    verify_lens, batch = run(jnp.int32(budget))
    assert verify_lens.tolist() == [*lens, 0, 0, 0]
    expected = step_layout(np.array([1, 1, 5]), np.array(lens), num_rows=6)
    assert batch.cu_q_lens.tolist() == expected.cu_q_lens.tolist()
    assert batch.cu_q_lens[3:].tolist() == [7 + budget] * 4
    assert (batch.seq_ids[: 7 + budget] >= 0).all()
    assert (batch.seq_ids[7 + budget :] == -1).all()
    assert batch.cu_q_lens.dtype == jnp.int32


@pytest.mark.parametrize("chunk_len", range(1, DRAFT_LEN + 2))
def test_case_32_prompt_chunks_of_the_length_of_a_verification(twins, texts, chunk_len):
    """Every chunk has as many tokens as a decoding row beside it may have; the texts stay the ordinary ones."""
    loop = Loop(
        twins.cfg,
        model_params(twins),
        programs(twins.cfg),
        random_budget,
        seed=fresh_seed(),
        shortest_chunk=chunk_len,
        longest_chunk=chunk_len,
    )
    requests = [Request(text.prompt, len(text.prompt) + NUM_TOKENS) for text in texts]
    loop.run(requests)
    assert [request.tokens for request in requests] == [text.greedy for text in texts]
    assert loop.mixed_chunks >= {chunk_len}


@pytest.mark.slow
def test_case_33_compiled_and_op_by_op_steps_agree(twins, texts):
    """The same admitted drafts and the same tokens, whether a step is one program or its operations one by one."""
    compiled = programs(twins.cfg)
    loop = Loop(
        twins.cfg, model_params(twins), compiled, random_budget, sits_out=0, skips_drafter=0
    )
    requests = [
        Request(text.prompt, len(text.prompt) + NUM_TOKENS, {"temperature": 1.0, "seed": slot})
        for slot, text in enumerate(texts[:SLOTS])
    ]
    for slot, request in enumerate(requests):
        request.slot = slot
    while not all(request.tokens for request in requests):
        loop.step(requests)
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def verify_twice(params, state, packed):
        copy = jax.tree.map(jnp.array, state)
        with jax.disable_jit():
            _, eager = compiled.verify.__wrapped__(params, copy, packed)
        state, outputs = compiled.verify(params, state, packed)
        seen.append((np.asarray(outputs.ints), np.asarray(eager.ints)))
        return state, outputs

    loop.programs = compiled._replace(verify=verify_twice)
    loop.budget = lambda loop, most: most // 2
    loop.step(requests)
    assert all(request.finish is RowFinish.RUNNING for request in requests)
    ((together, one_by_one),) = seen
    np.testing.assert_array_equal(together, one_by_one)
    assert together[:, -1].sum() > 0  # drafts were admitted
