"""Proposals that the step keeps, against a reference drafter that starts anew from the committed text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark_jax.decode.plan import RowFinish
from tests.decode.conftest import NUM_TOKENS
from tests.decode.driver import Loop, Request, full_budget, programs, random_budget
from tests.decode.model import model_params
from tests.parity.compare import FLOAT32_MODEL, assert_close
from torch_ref.draft import DSparkDrafter
from torch_ref.model import forward_with_states, tap_features


@pytest.mark.parametrize("budget", [full_budget, random_budget])
def test_every_proposal_equals_one_from_scratch(twins, texts, budget):
    loop = Loop(
        twins.cfg, model_params(twins), programs(twins.cfg), budget, sits_out=0, skips_drafter=0
    )
    requests = [Request(text.prompt, len(text.prompt) + NUM_TOKENS) for text in texts[:3]]
    for slot, request in enumerate(requests):
        request.slot = slot
    patterns = set()
    while running := [r for r in requests if r.finish is RowFinish.RUNNING]:
        loop.step(running)
        for request in running:
            if not request.tokens or request.finish is not RowFinish.RUNNING:
                continue
            patterns.add((request.verify_lens[-1], request.accept_lens[-1]))
            committed = [*request.prompt, *request.tokens]
            states = forward_with_states(
                twins.weights, twins.reference, torch.tensor([committed[:-1]])
            )[1]
            reference = DSparkDrafter(twins.weights, twins.reference)
            reference.extend(tap_features(states, reference.target_layer_ids)[0])
            expected = reference.propose(committed[-1])
            pending, name = loop.state.proposals, f"after {patterns}"
            assert pending.lens[request.slot] == loop.draft_len
            assert pending.tokens[request.slot].tolist() == expected.tokens.tolist()
            assert_close(pending.shaped[request.slot], expected.logits, FLOAT32_MODEL, name)
            assert_close(
                pending.confidences[request.slot], expected.confidences, FLOAT32_MODEL, name
            )
            np.testing.assert_array_equal(
                pending.confidences[request.slot], loop.confidences[request.slot]
            )
    rejected, partial, everything = (
        any(admitted and test(accepted, admitted) for admitted, accepted in patterns)
        for test in (
            lambda a, n: a == 0,
            lambda a, n: 0 < a < n,
            lambda a, n: a == n,
        )
    )
    assert rejected
    assert partial
    assert everything
