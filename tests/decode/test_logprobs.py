"""Log-probabilities of output and prompt, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.decode.conftest import NUM_TOKENS
from tests.decode.driver import Loop, Request, full_budget, no_budget, programs
from tests.decode.model import model_params
from tests.parity.compare import FLOAT32_MODEL, assert_close
from torch_ref.model import forward

WANTED = {"wants_logprobs": True, "wants_prompt_logprobs": True}


@pytest.mark.parametrize("budget", [no_budget, full_budget])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_36_logprobs_describe_the_tokens_they_stand_beside(twins, texts, budget, temperature):
    """Of raw logits, whatever the sampling parameters; one request does not want any."""
    requests = [
        Request(
            text.prompt,
            len(text.prompt) + NUM_TOKENS,
            {"temperature": temperature, "top_k": 5, "seed": 7, **(WANTED if i != 1 else {})},
        )
        for i, text in enumerate(texts)
    ]
    # All tokens of prompts need logits: short chunks keep a step below the number of logit rows.
    Loop(twins.cfg, model_params(twins), programs(twins.cfg), budget, seed=3, longest_chunk=4).run(
        requests
    )
    assert requests[1].prompt_logprobs == []
    for request in requests[:1] + requests[2:]:
        text = [*request.prompt, *request.tokens]
        logits = forward(twins.weights, twins.reference, torch.tensor([text]))[0]
        expected = logits.log_softmax(-1).numpy()
        start = len(request.prompt)
        # The row of the last prompt token is the first output token's.
        known = request.prompt_logprobs[:-1]
        assert len(known) == start - 1
        assert len(request.logprobs) == NUM_TOKENS
        for place, given in enumerate([*known, *request.logprobs], start=1):
            row = expected[place - 1]
            assert_close(given.chosen, row[text[place]], FLOAT32_MODEL, f"token {place}")
            assert_close(given.top, np.sort(row)[::-1][: len(given.top)], FLOAT32_MODEL)
            assert_close(given.top, row[given.top_ids], FLOAT32_MODEL)
