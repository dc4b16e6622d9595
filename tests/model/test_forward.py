"""The whole target in one pass, against the PyTorch reference."""

from __future__ import annotations

import pytest

from tests.parity.cases import TARGETS
from tests.parity.compare import FLOAT32_MODEL, assert_close
from tests.parity.target import expect, full_pass, make_twins, random_tokens
from tests.torch_ref.configs import tiny_config


@pytest.mark.parametrize("overrides", TARGETS.values(), ids=TARGETS.keys())
def test_logits_and_streams_equal_the_reference(overrides):
    twins = make_twins(tiny_config(**overrides), seed=1)
    token_ids = random_tokens(twins.reference, 70, seed=2)
    logits, taps = full_pass(twins, token_ids)
    expected_logits, expected_taps = expect(twins, token_ids)
    for layer in range(twins.cfg.num_hidden_layers):
        assert_close(taps[:, layer], expected_taps[:, layer], FLOAT32_MODEL, f"after layer {layer}")
    assert_close(logits, expected_logits, FLOAT32_MODEL, "logits")
