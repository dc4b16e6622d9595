"""Acceptance by a profile: its laws, its determinism, and the whole step around it."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import synthetic
from dspark_jax.decode.sampling import Stream, uniform
from dspark_jax.decode.verify import LogitRows, Method, verify_standard
from tests.decode.driver import BUDGETS, Loop, Request, full_budget, programs
from tests.decode.model import DRAFT_LEN, model_params
from tests.decode.tables import sampling_rows
from tests.quick_jit import quick_jit
from tests.seeds import fresh_seed

RATES = (0.78, 0.6, 0.46, 0.35, 0.24, 0.15, 0.09)
REQUESTS = 20000
# Four standard deviations of a share of that many independent requests.
SHARE = 4 * 0.5 / REQUESTS**0.5

acceptance = quick_jit(synthetic.acceptance)
publish = quick_jit(synthetic.publish)
ANCHORS = jnp.arange(REQUESTS) % 97 + 3


def profile(rates=RATES, request_spread=0.2, round_spread=0.15, **changes) -> np.ndarray:
    return synthetic.pack_profile(
        rates, request_spread=request_spread, round_spread=round_spread, **changes
    )


@quick_jit
def accept_lens(packed, rows, anchors, lens):
    """Verdicts on drafts that rejection sampling would all reject, because the target never draws them."""
    drafts = packed.shape[0] - 4
    target = jnp.zeros((REQUESTS * (drafts + 1), 3)).at[:, 0].set(-1e30)
    where = LogitRows(jnp.arange(REQUESTS) * (drafts + 1), lens, anchors)
    tokens = jnp.zeros((REQUESTS, drafts), jnp.int32)
    judge = partial(synthetic.judge, packed, rows, anchors)
    log_q = jnp.zeros((REQUESTS, drafts))
    shaped = lambda k: jnp.zeros((REQUESTS, 3)).at[:, 0].set(30.0)
    return verify_standard(target, tokens, log_q, shaped, where, rows, judge).accept_lens


@pytest.mark.parametrize(("request_spread", "round_spread"), [(0, 0), (0.3, 0), (0.2, 0.5)])
def test_accepted_shares_are_the_profile(request_spread, round_spread):
    rows = sampling_rows(REQUESTS, fresh_seed())
    packed = profile(request_spread=request_spread, round_spread=round_spread)
    lens = np.asarray(accept_lens(packed, rows, ANCHORS, jnp.full(REQUESTS, 7)))
    shares = [(lens >= k).mean() for k in range(1, 8)]
    np.testing.assert_allclose(shares, RATES, atol=SHARE)


def test_only_admitted_drafts_are_accepted():
    rows = sampling_rows(REQUESTS, 1)
    admitted = jnp.arange(REQUESTS) % 4
    lens = np.asarray(accept_lens(profile(), rows, ANCHORS, admitted))
    every = np.asarray(accept_lens(profile(), rows, ANCHORS, jnp.full(REQUESTS, 7)))
    np.testing.assert_array_equal(lens, np.minimum(every, admitted))


def test_extreme_rates():
    rows = sampling_rows(REQUESTS, 2)
    packed = profile(rates=(1.0, 1.0, 0.5, 0.0, 0.0), request_spread=0, round_spread=0)
    got = np.asarray(acceptance(packed, rows, ANCHORS))
    np.testing.assert_allclose(got[:, :2], 1, atol=3e-5)
    np.testing.assert_allclose(got[:, 2], 0.5, atol=1e-4)
    np.testing.assert_allclose(got[:, 3], 0, atol=1e-4)
    assert np.isfinite(got).all()


def test_confidences_are_calibrated_or_wrong_by_the_factor():
    rows = sampling_rows(REQUESTS, fresh_seed())
    own = jnp.full((REQUESTS, 7), 0.123)
    said = np.asarray(publish(profile(), rows, ANCHORS, own))
    true = np.asarray(acceptance(profile(), rows, ANCHORS))
    np.testing.assert_array_equal(said, true)
    wrong = np.asarray(publish(profile(miscalibration=2.5), rows, ANCHORS, own))
    log_odds = lambda p: np.log(p / (1 - p))
    inner = (true > 0.05) & (true < 0.95)
    np.testing.assert_allclose(
        log_odds(wrong[inner]), 2.5 * log_odds(true[inner]), rtol=1e-3, atol=1e-4
    )
    # What a coin accepts given that confidence: bin by bin the confidence itself.
    lens = np.asarray(accept_lens(profile(), rows, ANCHORS, jnp.full(REQUESTS, 7)))
    for k in (0, 2):
        reached = lens >= k
        order = np.argsort(said[reached, k])
        for part in np.array_split(order, 5):
            share = (lens[reached][part] > k).mean()
            mean = said[reached, k][part].mean()
            assert abs(share - mean) < 4 * 0.5 / len(part) ** 0.5, (k, mean, share)


def test_requests_and_rounds_differ_as_the_spreads_say():
    rows = sampling_rows(REQUESTS, 3)
    same = rows.take(jnp.zeros(REQUESTS, jnp.int32))
    only_request = np.asarray(acceptance(profile(round_spread=0), same, ANCHORS))
    np.testing.assert_allclose(only_request, np.broadcast_to(only_request[0], (REQUESTS, 7)))
    first = np.asarray(acceptance(profile(round_spread=0), rows, ANCHORS))[:, 0]
    # A request at one standard deviation: Phi((0.2**.5 + Phi^-1(0.78)) / 0.8**.5) = 0.914.
    np.testing.assert_allclose(np.quantile(first, 0.8413), 0.914, atol=0.01)
    both = np.asarray(acceptance(profile(), same, ANCHORS))[:, 0]
    assert both.std() > 0.05


def test_what_is_known_of_a_round_hangs_on_seed_and_anchor_alone():
    rows = sampling_rows(REQUESTS, 4)
    order = np.random.default_rng(0).permutation(REQUESTS)
    straight = np.asarray(acceptance(profile(), rows, ANCHORS))
    np.testing.assert_array_equal(
        np.asarray(acceptance(profile(), rows.take(order), ANCHORS[order])), straight[order]
    )
    # The coins are independent of it: no correlation beyond chance.
    coins = np.asarray(quick_jit(lambda r, p: uniform(r, p, Stream.ACCEPT))(rows, ANCHORS + 1))
    assert abs(np.corrcoef(coins, straight[:, 0])[0, 1]) < 4 / REQUESTS**0.5


@pytest.fixture(scope="module")
def synthetic_programs(twins):
    return programs(twins.cfg, Method.SYNTHETIC)


def run(twins, both, packed, *, budget=full_budget, **sampling) -> tuple[Loop, list[Request]]:
    loop = Loop(
        twins.cfg, model_params(twins), both, budget, seed=7, skips_drafter=0.0, sits_out=0.0
    )
    loop.state = loop.state.replace(synthetic=jnp.asarray(packed))
    rng = np.random.default_rng(1)
    requests = [
        Request(rng.integers(2, 60, 9).tolist(), 80, {"seed": 100 + i, **sampling})
        for i in range(24)
    ]
    loop.run(requests)
    return loop, requests


def test_whole_steps_accept_by_the_profile(twins, synthetic_programs):
    rates = (0.8, 0.5, 0.3, 0.2)
    packed = profile(rates=rates, request_spread=0.0, round_spread=0.0)
    _, requests = run(twins, synthetic_programs, packed, temperature=1.0)
    rounds = [
        (verified, accepted)
        for request in requests
        # The first step fed the prompt; the last one may have been cut at the limit.
        for verified, accepted in list(zip(request.verify_lens, request.accept_lens))[1:-1]
    ]
    for k, rate in enumerate(rates, 1):
        judged = [accepted >= k for verified, accepted in rounds if verified >= k]
        assert abs(np.mean(judged) - rate) < 4 * (rate * (1 - rate) / len(judged)) ** 0.5


def test_the_budget_sees_the_synthetic_confidences(twins, synthetic_programs):
    packed = profile(rates=(0.8, 0.5, 0.3, 0.2), miscalibration=1.5)
    loop, _ = run(twins, synthetic_programs, packed)
    assert loop.state.proposals is not None
    # Whatever was drafted last in a slot has the confidences of its seed and anchor.
    rng = np.random.default_rng(2)
    fresh = [Request(rng.integers(2, 60, 9).tolist(), 80, {"seed": 5}) for _ in range(4)]
    for slot, request in enumerate(fresh):
        request.slot = slot
    for _ in range(8):
        loop.step(fresh)
    rows = sampling_rows(4, 0).replace(seed=jnp.tile(jnp.array([[5, 0]], jnp.uint32), (4, 1)))
    expected = publish(packed, rows, loop.state.positions, jnp.zeros((4, DRAFT_LEN)))
    assert all(len(request.tokens) > 1 for request in fresh)
    np.testing.assert_allclose(loop.confidences, expected, rtol=1e-5)
    np.testing.assert_array_equal(loop.state.proposals.confidences, loop.confidences)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_disabled_it_is_rejection_sampling(twins, synthetic_programs, temperature):
    """Also: the model's own verdict and confidences are computed, since a run-time number chooses."""
    packed = profile(rates=(0.8, 0.5, 0.3, 0.2), is_enabled=False)
    plain = programs(twins.cfg)
    budget = BUDGETS["random"]
    _, got = run(twins, synthetic_programs, packed, budget=budget, temperature=temperature)
    loop = Loop(
        twins.cfg, model_params(twins), plain, budget, seed=7, skips_drafter=0.0, sits_out=0.0
    )
    rng = np.random.default_rng(1)
    expected = [
        Request(rng.integers(2, 60, 9).tolist(), 80, {"seed": 100 + i, "temperature": temperature})
        for i in range(24)
    ]
    loop.run(expected)
    assert [request.tokens for request in got] == [request.tokens for request in expected]
