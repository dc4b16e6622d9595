"""Stop ids, limits and minimum lengths: where a text ends, also in the middle of accepted drafts."""

from __future__ import annotations

import pytest

from dspark_jax.decode.plan import RowFinish
from tests.decode.conftest import NUM_TOKENS
from tests.decode.driver import Loop, Request, full_budget, programs, random_budget
from tests.decode.model import greedy_text, model_params
from tests.seeds import fresh_seed


def continue_all(twins, requests, budget=full_budget, **options) -> None:
    loop = Loop(
        twins.cfg,
        model_params(twins),
        programs(twins.cfg),
        budget,
        seed=fresh_seed(),
        skips_drafter=0,
        **options,
    )
    loop.run(requests)


def test_a_stop_id_ends_the_text_wherever_it_stands(twins, texts):
    """Every token of the greedy texts takes its turn as the stop id, so it meets every place of a draft."""
    requests, expected, places = [], [], set()
    for text in texts:
        for token in sorted(set(text.greedy)):
            requests.append(
                Request(text.prompt, len(text.prompt) + NUM_TOKENS, {"stop_ids": (63, token)})
            )
            first = min(i for i, t in enumerate(text.greedy) if t in (63, token))
            expected.append(text.greedy[: first + 1])
    continue_all(twins, requests)
    for request, tokens in zip(requests, expected):
        assert request.tokens == tokens
        assert request.finish is RowFinish.STOP
        places.add((request.verify_lens[-1], request.accept_lens[-1]))
    # Among them: the drawn token itself, and accepted drafts with others behind them.
    assert {accepted for _, accepted in places} >= {0, 1, 2}
    assert any(accepted < admitted for admitted, accepted in places)


@pytest.mark.parametrize("budget", [full_budget, random_budget])
def test_case_40_limits_are_exact(twins, texts, budget):
    requests = [
        Request(text.prompt, len(text.prompt) + count) for text in texts for count in range(1, 10)
    ]
    continue_all(twins, requests, budget)
    for request in requests:
        count = request.limit - len(request.prompt)
        greedy = next(text.greedy for text in texts if text.prompt == request.prompt)
        assert request.tokens == greedy[:count]
        assert request.finish is RowFinish.LENGTH


def test_a_stop_id_at_the_limit_counts_as_a_stop(twins, texts):
    requests = []
    for text in texts:
        first = {token: i for i, token in reversed(list(enumerate(text.greedy)))}
        requests += [
            Request(text.prompt, len(text.prompt) + place + 1, {"stop_ids": (token,)})
            for token, place in first.items()
        ]
    continue_all(twins, requests)
    for request in requests:
        assert len(request.tokens) == request.limit - len(request.prompt)
        assert request.finish is RowFinish.STOP


@pytest.mark.parametrize("least", [1, 4, 12])
def test_stop_ids_cannot_be_drawn_before_the_minimum_length(twins, texts, least):
    requests, expected = [], []
    for text in texts:
        stop_ids = (text.greedy[0], text.greedy[5])
        minimum = len(text.prompt) + least
        sampling = {"stop_ids": stop_ids, "min_len": minimum}
        requests.append(Request(text.prompt, len(text.prompt) + NUM_TOKENS, sampling))
        expected.append(
            greedy_text(twins, text.prompt, NUM_TOKENS, stop_ids=stop_ids, min_len=minimum)
        )
    continue_all(twins, requests)
    assert [request.tokens for request in requests] == expected
