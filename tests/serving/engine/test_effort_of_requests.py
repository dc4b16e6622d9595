"""What a client asks for decides which programs run: most requests need those without branches."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_jax.decode.effort import Effort
from dspark_jax.serving.sequence import Sequence
from tests.serving.engine.harness import make_request


def efforts(**sampling: Any) -> set[Effort]:
    """Of a prompt row and a decode row."""
    sequence = Sequence(make_request(**sampling), max_model_len=64, eos_token_id=1, seed=3)
    sequence.admit(0)
    return {sequence.prompt_row(3).effort, sequence.decode_row(2).effort}


@pytest.mark.parametrize(
    ("sampling", "effort"),
    [
        ({}, Effort.PLAIN),
        ({"temperature": 0.0}, Effort.PLAIN),
        ({"ignore_eos": True}, Effort.PLAIN),
        ({"stop_token_ids": (4,)}, Effort.PLAIN),
        ({"min_tokens": 3}, Effort.FULL),
        ({"top_p": 0.9}, Effort.FULL),
        ({"logprobs": 0}, Effort.FULL),
    ],
)
def test_effort_of_a_request(sampling: dict[str, Any], effort: Effort) -> None:
    assert efforts(**sampling) == {effort}
