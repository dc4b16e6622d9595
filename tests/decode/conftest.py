"""One tiny model and its texts for all tests of decoding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.decode.model import VOCAB, agreeing_twins, greedy_text

NUM_TOKENS = 24


class Text(NamedTuple):
    """A prompt, and its ordinary greedy continuation by `NUM_TOKENS` tokens."""

    prompt: list[int]
    greedy: list[int]


@pytest.fixture(scope="session")
def twins():
    return agreeing_twins()


@pytest.fixture(scope="session")
def texts(twins) -> list[Text]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in (9, 17, 26, 5, 12)]
    return [Text(prompt, greedy_text(twins, prompt, NUM_TOKENS)) for prompt in prompts]
