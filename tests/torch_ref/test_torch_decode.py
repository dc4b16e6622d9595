"""Cached decoding against the same model without a cache."""

from __future__ import annotations

import random

import pytest
import torch

from tests.parity.compare import FLOAT32_UNROLLED, assert_close
from tests.seeds import fresh_seed
from tests.torch_ref.configs import tiny_config
from torch_ref.decode import DecodeCache, greedy_no_cache, new_cache, prefill, rollback, step
from torch_ref.model import forward_with_states
from torch_ref.quantization import round_cache_row
from torch_ref.random_weights import random_weights

SCHEDULES = {
    "every kind of layer": {},
    "schedule of Pro": {"compress_ratios": (8, 8, 4, 8, 4), "swiglu_limit": 0.3, "index_topk": 3},
    "CSA at 2, HCA at 16": {"compress_ratios": (2, 16, 0, 2), "csa_compress_ratio": 2},
}
NUM_TOKENS = 45


def poison_beyond(cache: DecodeCache, ratios: tuple[int, ...]) -> None:
    """Overwrite with NaN whatever the next step writes before it may read."""
    ahead = torch.arange(cache.length, cache.length + cache.max_step)
    for layer, ratio in zip(cache.layers, ratios):
        parts = [part for part in (layer.attention, layer.index) if part is not None]
        for ring in [layer.rows] + [part.raw for part in parts]:
            ring[ahead % len(ring)] = torch.nan
        for part in parts:
            part.entries[cache.length // ratio :] = torch.nan


@pytest.mark.parametrize("max_step", [1, 3, 8])
@pytest.mark.parametrize("overrides", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_random_steps_with_rejections_equal_no_cache(overrides, max_step):
    cfg = tiny_config(**overrides)
    seed = fresh_seed()
    rng = random.Random(seed)
    weights = random_weights(cfg, seed)
    tokens = [rng.randrange(cfg.vocab_size) for _ in range(NUM_TOKENS)]
    expected, expected_states = forward_with_states(weights, cfg, torch.tensor([tokens]))
    cache = new_cache(cfg, NUM_TOKENS + max_step, max_step)
    while cache.length < NUM_TOKENS:
        start = cache.length
        count = rng.randint(1, max_step)
        num_accepted = min(rng.randint(1, count), NUM_TOKENS - start)
        accepted = tokens[start : start + num_accepted]
        rejected = [rng.randrange(cfg.vocab_size) for _ in range(count - num_accepted)]
        logits, states = step(weights, cfg, cache, accepted + rejected, start)
        rollback(cache, start + num_accepted)
        poison_beyond(cache, cfg.compress_ratios)
        name = f"{num_accepted} of {count} at {start}"
        committed = slice(start, start + num_accepted)
        assert_close(logits[:num_accepted], expected[0, committed], FLOAT32_UNROLLED, name)
        for layer, state in enumerate(expected_states):
            assert_close(
                states[layer][:, :num_accepted],
                state[:, committed],
                FLOAT32_UNROLLED,
                f"{layer} {name}",
            )


def test_everything_rejected_then_repeated():
    cfg = tiny_config()
    weights = random_weights(cfg, 4)
    tokens = torch.randint(
        cfg.vocab_size, (40,), generator=torch.Generator().manual_seed(5)
    ).tolist()
    cache = new_cache(cfg, 48, 8)
    prefill(weights, cfg, cache, tokens[:31])
    first, _ = step(weights, cfg, cache, [7] * 8, 31)
    rollback(cache, 31)
    poison_beyond(cache, cfg.compress_ratios)
    again, _ = step(weights, cfg, cache, [7] * 8, 31)
    assert_close(again, first, FLOAT32_UNROLLED)


def test_greedy_loop_equals_cached_greedy():
    cfg = tiny_config()
    weights = random_weights(cfg, 6)
    prompt = [5, 9, 2, 77, 31, 8, 8, 100, 64, 3]
    expected = greedy_no_cache(weights, cfg, prompt, 24)
    cache = new_cache(cfg, 40, 4)
    logits, _ = prefill(weights, cfg, cache, prompt)
    output = [int(logits[-1].argmax())]
    while len(output) < 24:
        logits, _ = step(weights, cfg, cache, output[-1:], cache.length)
        output.append(int(logits[0].argmax()))
    assert output == expected


def test_rounded_rows_are_stored():
    """With rounding simulated the cache holds exactly what its storage format can express."""
    cfg = tiny_config()
    weights = random_weights(cfg, 8)
    for rounds in (True, False):
        cache = new_cache(cfg, 40, 40)
        step(weights, cfg, cache, list(range(40)), 0, simulate_quantization=rounds)
        for rows in [cache.layers[1].rows[:40], cache.layers[1].attention.entries]:
            again = round_cache_row(rows, cfg.qk_rope_head_dim)
            assert torch.equal(again, rows) == rounds


@pytest.mark.parametrize(
    ("tokens", "start", "message"),
    [
        ([1], 3, "start=3"),
        ([], 4, "0 tokens at 4"),
        ([1] * 5, 4, "5 tokens at 4"),
        ([1] * 4, 4, "4 tokens at 4"),
    ],
)
def test_steps_the_cache_cannot_hold_are_refused(tokens, start, message):
    cfg = tiny_config()
    weights = random_weights(cfg, 8)
    cache = new_cache(cfg, 7, 4)
    step(weights, cfg, cache, [1, 2, 3, 4], 0)
    with pytest.raises(ValueError, match=message):
        step(weights, cfg, cache, tokens, start)


@pytest.mark.parametrize("length", [3, 9])
def test_roll_back_beyond_the_last_step_is_refused(length):
    cfg = tiny_config()
    cache = new_cache(cfg, 20, 4)
    prefill(random_weights(cfg, 8), cfg, cache, [1] * 8)
    with pytest.raises(ValueError, match=f"length {length} is outside 4 ... 8"):
        rollback(cache, length)
