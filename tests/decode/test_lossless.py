"""The project's central claim: whatever is drafted and verified, the text is that of ordinary decoding."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.budget import allocate
from dspark_jax.decode.plan import RowFinish
from dspark_jax.decode.verify import Method
from dspark_jax.kernels.rows import RowFormat
from tests.decode.conftest import NUM_TOKENS, Text
from tests.decode.driver import (
    BUDGETS,
    Budget,
    Loop,
    Programs,
    Request,
    full_budget,
    no_budget,
    programs,
    random_budget,
)
from tests.decode.model import VOCAB, model_params
from tests.seeds import fresh_seed

SAMPLING = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 + 17},
    {"temperature": 1.2, "top_k": 12, "min_p": 0.02, "seed": 3},
    # Rewards: tokens come again within a draft, whose own tokens the next ones must already know.
    {"temperature": 1.0, "seed": 4, "frequency_penalty": -0.6, "presence_penalty": -1.0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 5, "repetition_penalty": 1.4},
]
"""Sampling parameters of the five texts, one each."""


def requests_for(texts: Sequence[Text], sampling: Sequence[dict] = ({},) * 5) -> list[Request]:
    return [
        Request(text.prompt, len(text.prompt) + NUM_TOKENS, dict(row))
        for text, row in zip(texts, sampling)
    ]


def continued(twins, kind: Programs, budget: Budget, requests: list[Request], **options):
    params = model_params(twins, drafter=kind.draft is not None)
    Loop(twins.cfg, params, kind, budget, seed=fresh_seed(), **options).run(requests)
    return [request.tokens for request in requests]


@pytest.fixture(scope="module")
def ordinary(twins, texts):
    """What ordinary sampling makes of the texts: the program without a drafter, one request at a time."""
    kind = programs(twins.cfg, drafter=False)
    requests = requests_for(texts, SAMPLING)
    for request in requests:
        continued(twins, kind, no_budget, [request])
    return [request.tokens for request in requests]


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_case_35_greedy_text_is_the_same_for_every_budget(twins, texts, budget):
    for _ in range(3):
        requests = requests_for(texts)
        tokens = continued(twins, programs(twins.cfg), budget, requests)
        assert tokens == [text.greedy for text in texts]
        assert all(request.finish is RowFinish.LENGTH for request in requests)
        accepted = {n for request in requests for n in request.accept_lens}
        # Otherwise the drafter had no say, and the test nothing to find.
        assert accepted == {0} if budget is no_budget else {0, 1, 2} <= accepted


@pytest.mark.parametrize("budget", [full_budget, random_budget])
def test_greedy_text_over_fp8_rows_is_the_same_for_every_budget(twins, texts, budget):
    """Beside the same program without drafts: one with other sums may round a row to another code, and diverge."""
    kind, over_fp8 = programs(twins.cfg), {"row_format": RowFormat.FP8}
    expected = continued(twins, kind, no_budget, requests_for(texts), **over_fp8)
    requests = requests_for(texts)
    assert continued(twins, kind, budget, requests, **over_fp8) == expected
    assert {0, 1, 2} <= {n for request in requests for n in request.accept_lens}


def test_greedy_drafts_leave_the_greedy_text_alone(twins, texts):
    kind = programs(twins.cfg, greedy_drafts=True)
    tokens = continued(twins, kind, random_budget, requests_for(texts))
    assert tokens == [text.greedy for text in texts]


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_coupled_sampling_is_ordinary_sampling_token_for_token(twins, texts, ordinary, budget):
    requests = requests_for(texts, SAMPLING)
    tokens = continued(twins, programs(twins.cfg, Method.COUPLED), budget, requests)
    assert tokens == ordinary
    if budget is full_budget:
        assert sum(sum(request.accept_lens) for request in requests) > 10


def test_seeds_tell_texts_apart(twins, texts, ordinary):
    requests = requests_for(texts, [{**row, "seed": row["seed"] + 1} for row in SAMPLING])
    tokens = continued(twins, programs(twins.cfg, drafter=False), no_budget, requests)
    assert all(other != own for other, own in zip(tokens, ordinary))


def test_standard_sampling_without_drafts_is_ordinary_sampling(twins, texts, ordinary):
    requests = requests_for(texts, SAMPLING)
    assert continued(twins, programs(twins.cfg), no_budget, requests) == ordinary


@pytest.mark.parametrize("leaf", ["g_norm", "w_confidence"])
def test_a_drafter_of_nan_costs_speed_only(twins, texts, ordinary, leaf):
    """Its confidences count as 0 and its drafts are drawn from some proper distribution."""
    params = model_params(twins)
    poison = jnp.full_like(getattr(params.draft, leaf), jnp.nan)
    params = params.replace(draft=params.draft.replace(**{leaf: poison}))
    for method, sampling, expected in (
        (Method.STANDARD, ({},) * 5, [text.greedy for text in texts]),
        (Method.COUPLED, SAMPLING, ordinary),
    ):
        requests = requests_for(texts, sampling)
        loop = Loop(twins.cfg, params, programs(twins.cfg, method), full_budget, seed=1)
        loop.run(requests)
        assert [request.tokens for request in requests] == expected
        assert sum(sum(request.verify_lens) for request in requests) > 0
        assert np.isfinite(loop.state.proposals.logprobs).all()
        assert np.isfinite(loop.state.proposals.shaped).all()


def test_a_request_admitted_again_goes_on_as_if_nothing_had_happened(twins, texts, ordinary):
    """Prompt and output so far are fed anew in another slot; penalties still know which tokens were output."""
    kind = programs(twins.cfg, Method.COUPLED)
    first = requests_for(texts, SAMPLING)
    for request, kept in zip(first, (1, 7, 10, 13, 20)):
        request.limit = len(request.prompt) + kept
    continued(twins, kind, full_budget, first)
    second = [
        Request([*r.prompt, *r.tokens], full.limit, r.sampling, prompt_len=len(r.prompt))
        for r, full in zip(first, requests_for(texts))
    ]
    continued(twins, kind, full_budget, second[::-1])
    assert [a.tokens + b.tokens for a, b in zip(first, second)] == ordinary


@pytest.mark.parametrize("min_depth", [0, 2])
def test_the_budget_goes_to_the_likeliest_survivors(twins, texts, min_depth):
    """What the device admits is what the host's definition admits, and limits cap it."""
    loop = Loop(
        twins.cfg,
        model_params(twins),
        programs(twins.cfg),
        random_budget,
        sits_out=0,
        skips_drafter=0,
        min_depth=min_depth,
    )
    requests = requests_for(texts[:4])
    budgets: list[int] = []
    loop.budget = lambda loop, most: budgets.append(random_budget(loop, most)) or budgets[-1]
    for slot, request in enumerate(requests):
        request.slot = slot
        while not request.tokens:
            loop.step([request])
    while all(request.finish is RowFinish.RUNNING for request in requests):
        confidences = loop.confidences
        room = [r.limit - len(r.prompt) - len(r.tokens) - 1 for r in requests]
        caps = np.minimum(room, loop.draft_len)
        loop.step(requests)
        admitted = [request.verify_lens[-1] for request in requests]
        budget = min(budgets[-1], int(caps.sum()))
        expected = allocate(confidences, caps, budget, min_depth=min_depth)
        assert admitted == expected.tolist()


def test_texts_are_not_trivial(texts, ordinary):
    for tokens in [text.greedy for text in texts] + ordinary:
        assert len(tokens) == NUM_TOKENS
        assert len(set(tokens)) > 4
        assert all(0 <= token < VOCAB for token in tokens)
