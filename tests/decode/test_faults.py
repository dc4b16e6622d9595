"""A request whose numbers break fails alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.plan import RowFinish
from tests.decode.conftest import NUM_TOKENS
from tests.decode.driver import Loop, Request, full_budget, programs
from tests.decode.model import VOCAB, model_params

RINGS = ("window", "csa_open", "index_open", "hca_open")
"""Leaves of the cache that belong to slots."""


def loop_of_two(twins, texts, params=None) -> tuple[Loop, list[Request]]:
    """Two requests in one loop, fed together."""
    loop = Loop(
        twins.cfg,
        params or model_params(twins),
        programs(twins.cfg),
        full_budget,
        skips_drafter=0,
        longest_chunk=NUM_TOKENS,
    )
    requests = [Request(text.prompt, len(text.prompt) + NUM_TOKENS) for text in texts[:2]]
    for slot, request in enumerate(requests):
        request.slot = slot
    return loop, requests


def finish(loop: Loop, request: Request) -> None:
    while request.finish is RowFinish.RUNNING:
        loop.step([request])


@pytest.mark.parametrize("where", ["window", "csa_entries", "hca_open"])
def test_a_poisoned_cache_ends_its_own_request_only(twins, texts, where):
    loop, (victim, other) = loop_of_two(twins, texts)
    while len(victim.tokens) < 4 or len(other.tokens) < 4:
        loop.step([victim, other])
    before = list(victim.tokens)
    cache = loop.state.cache
    owned = loop.page_table[victim.slot] if where == "csa_entries" else victim.slot
    poisoned = getattr(cache, where).at[:, owned].set(jnp.nan)
    loop.state = loop.state.replace(cache=cache.replace(**{where: poisoned}))
    while victim.finish is RowFinish.RUNNING:
        loop.step([victim, other])
    assert victim.finish is RowFinish.NON_FINITE
    assert victim.tokens == before
    for _ in range(2):  # it is planned twice more, and stays silent
        loop.step([other, victim])
    finish(loop, other)
    assert other.tokens == texts[1].greedy
    # The slot and its pages, NaN and all, serve the next request.
    heir = Request(texts[2].prompt, len(texts[2].prompt) + NUM_TOKENS, slot=victim.slot)
    finish(loop, heir)
    assert heir.tokens == texts[2].greedy


def test_a_poisoned_prompt_fails_alone(twins, texts):
    used = {token for text in texts[:2] for token in [*text.prompt, *text.greedy]}
    token = next(t for t in range(4, VOCAB) if t not in used)
    params = model_params(twins)
    embed = params.target.embed.at[token].set(jnp.nan)
    params = params.replace(target=params.target.replace(embed=embed))
    loop, (_, other) = loop_of_two(twins, texts, params)
    victim = Request([*texts[0].prompt, token], 60, slot=0)
    while victim.finish is RowFinish.RUNNING:
        loop.step([victim, other])
    assert victim.finish is RowFinish.NON_FINITE
    assert victim.tokens == []
    finish(loop, other)
    assert other.tokens == texts[1].greedy


def test_padding_and_sitting_out_leave_a_request_alone(twins, texts):
    """Steps of one request change nothing that belongs to another slot."""
    loop, (first, second) = loop_of_two(twins, texts)
    while len(second.tokens) < 3:
        loop.step([second])

    def of_second(state):
        host = jax.tree.map(np.asarray, state)
        rings = [host.draft_window, *(getattr(host.cache, name) for name in RINGS)]
        rest = host.replace(cache=None, draft_window=None)
        leaves = [leaf[second.slot] for leaf in jax.tree.leaves(rest)]
        return [ring[:, second.slot] for ring in rings] + leaves

    before = of_second(loop.state)
    for _ in range(4):
        loop.step([first])
    for after, old in zip(of_second(loop.state), before, strict=True):
        np.testing.assert_array_equal(after, old)
    finish(loop, second)
    assert second.tokens == texts[1].greedy
