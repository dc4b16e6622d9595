"""The model over rounded cache rows: what it computes, and that storing them in fp8 changes nothing more.

Two programs that compute the same differ by 1e-7, which may put a value on the other side of an edge between two
codes. It then is a step of e4m3 off, a quarter of which rounding costs it on the mean. One of ten thousand values
moves a result by a few per cent of what rounding does, another block length or place of rounding by as much as
rounding itself. So results are compared on the scale of that effect.
"""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.kernels.rows import RowFormat, decode
from tests.parity.cases import TARGETS
from tests.parity.compare import FLOAT32_MODEL
from tests.parity.target import CachedTarget, Chunk, expect, full_pass, make_twins, random_tokens
from tests.seeds import fresh_seed
from tests.torch_ref.configs import tiny_config
from torch_ref.quantization import Simulation

LENGTH = 70
FORMATS = [RowFormat.PLAIN, RowFormat.ROUNDED, RowFormat.FP8]


def assert_rounded_alike(
    actual: np.ndarray, rounded: np.ndarray, plain: np.ndarray, name: str
) -> None:
    """Raise unless `actual` is as far from `plain` as `rounded` is, and in the same direction."""
    effect = np.linalg.norm(rounded - plain)
    assert effect > 1e-3 * np.linalg.norm(plain), f"{name}: nothing was rounded"
    assert np.linalg.norm(actual - rounded) < 0.05 * effect, name


@pytest.mark.parametrize("overrides", TARGETS.values(), ids=TARGETS.keys())
def test_rounded_rows_equal_the_reference(overrides):
    twins = make_twins(tiny_config(**overrides), seed=1)
    token_ids = random_tokens(twins.reference, LENGTH, seed=2)
    actual = full_pass(twins, token_ids, RowFormat.ROUNDED)
    rounded = expect(twins, token_ids, Simulation(cache_rows=True))
    for name, *arrays in zip(("logits", "streams"), actual, rounded, expect(twins, token_ids)):
        assert_rounded_alike(*arrays, name)


@pytest.mark.parametrize("row_format", FORMATS[1:], ids=["rounded", "fp8"])
def test_first_layer_equals_the_reference(row_format):
    """One layer over a window: few rows of few tokens can turn, and all others agree to the last digits."""
    twins = make_twins(tiny_config(compress_ratios=(0,), num_hash_layers=1), seed=1)
    token_ids = random_tokens(twins.reference, LENGTH, seed=2)
    _, taps = full_pass(twins, token_ids, row_format)
    _, expected = expect(twins, token_ids, Simulation(cache_rows=True))
    close = np.abs(taps - expected).max(axis=(1, 2)) < FLOAT32_MODEL.absolute
    assert close.mean() > 0.7


def test_fp8_equals_rounded_rows():
    """Logits and caches, through steps of two requests with rejections.

    The indexer keeps every entry, because its keys are rounded in fp8 only.
    """
    twins = make_twins(tiny_config(index_topk=100), seed=3)
    texts = [random_tokens(twins.reference, 48, seed) for seed in (10, 11)]
    targets = [CachedTarget(twins, max_len=64, row_format=kind) for kind in FORMATS]
    rng = np.random.default_rng(fresh_seed())
    logits = [[] for _ in targets]
    while (targets[0].lengths[:2] < 48).all():
        starts = targets[0].lengths[:2]
        counts = [int(min(rng.integers(1, 13), 48 - start)) for start in starts]
        chunks = [
            Chunk(slot, text[start : start + count], int(rng.integers(0, count + 1)))
            for slot, (text, start, count) in enumerate(zip(texts, starts, counts))
        ]
        for target, own in zip(targets, logits):
            own += [result for result, _ in target.step(chunks)]
    plain, rounded, packed = (np.concatenate(own) for own in logits)
    assert_rounded_alike(packed, rounded, plain, "logits")
    caches = [target.cache for target in targets]
    for name in ("window", "csa_entries", "hca_entries"):
        plain, rounded, packed = (np.asarray(decode(getattr(cache, name))) for cache in caches)
        written = np.isfinite(rounded)
        np.testing.assert_array_equal(np.isfinite(packed), written)
        assert_rounded_alike(packed[written], rounded[written], plain[written], name)
    keys, stored = (np.asarray(decode(cache.index_keys)) for cache in caches[1:])
    # Half a step of e4m3, or of its least step for the row's largest value, and what turned rows change.
    bound = np.abs(keys) / 16 + np.abs(keys).max(axis=-1, keepdims=True) / 2**15 + 1e-2
    written = np.isfinite(keys)
    np.testing.assert_array_equal(np.isfinite(stored), written)
    assert (np.abs(stored - keys)[written] <= bound[written]).all()
    assert (stored != keys)[written].mean() > 0.5
