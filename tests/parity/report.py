"""`python -m tests.parity.report`: how far the implementations are apart, in one table.

Largest absolute differences in float32 on random tiny models, whose logits have a standard deviation near one:
the PyTorch reference against Hugging Face transformers, and JAX against the PyTorch reference in one pass, in
cached steps with rejections, and in both drafters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dspark_jax.checkpoint.deepspec import load_deepspec
from dspark_jax.draft.dense import init_dense_context
from tests.draft import dense_drafters as dense
from tests.draft.drafters import Drafters
from tests.parity.cases import TARGETS
from tests.parity.hf import hf_model
from tests.parity.target import (
    CachedTarget,
    Chunk,
    Twins,
    expect,
    full_pass,
    make_twins,
    random_tokens,
)
from tests.torch_ref.configs import dense_config, random_features, tiny_config, tiny_dspark_config
from torch_ref.dense_draft import DenseDrafter
from torch_ref.draft import DSparkDrafter

LENGTH = 70


class Line(NamedTuple):
    """One comparison."""

    compared: str
    model: str
    quantity: str
    difference: float
    deviation: float  # standard deviation of the expected values


def line(compared: str, model: str, quantity: str, actual, expected) -> Line:
    """Measure `actual` against `expected`, arrays of one shape."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    difference = np.abs(actual - expected).max()
    return Line(compared, model, quantity, float(difference), float(expected.std()))


def target_lines(model: str, overrides: dict) -> Iterator[Line]:
    """Both comparisons of one target."""
    twins = make_twins(tiny_config(**overrides), seed=1)
    token_ids = random_tokens(twins.reference, LENGTH, seed=2)
    expected, means = expect(twins, token_ids)
    with torch.no_grad():
        oracle = hf_model(twins.weights, twins.reference)
        theirs = oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
    yield line("torch_ref / transformers", model, "logits", expected, theirs)
    logits, taps = full_pass(twins, token_ids)
    yield line("JAX / torch_ref, one pass", model, "logits", logits, expected)
    yield line("JAX / torch_ref, one pass", model, "streams", taps, means)
    yield line("JAX / torch_ref, cached", model, "logits", cached(twins, token_ids), expected)


def cached(twins: Twins, token_ids: list[int]) -> np.ndarray:
    """Logits [S, V] by steps of 1 to 8 tokens, of which a random number is accepted."""
    rng = np.random.default_rng(3)
    target = CachedTarget(twins, max_len=LENGTH + 8, tokens=8, rows=2)
    parts = []
    while (start := int(target.lengths[1])) < LENGTH:
        count = int(rng.integers(1, 9))
        accepted = min(int(rng.integers(1, count + 1)), LENGTH - start)
        wrong = rng.integers(0, twins.reference.vocab_size, count - accepted)
        chunk = Chunk(1, [*token_ids[start : start + accepted], *wrong], accepted)
        parts.append(target.step([chunk])[0][0])
    return np.concatenate(parts)


def draft_lines() -> Iterator[Line]:
    """The drafter of released checkpoints, over contexts shorter and longer than its window."""
    reference = tiny_dspark_config(compress_ratios=(0, 0, 0), dspark_target_layer_ids=(0, 1, 2))
    twins = make_twins(reference, seed=4)
    drafters, expected = Drafters(twins), []
    for slot, length in enumerate((1, 7, 8, 30)):
        features = random_features(length, 3 * reference.hidden_size, slot)
        drafters.extend({slot: features}, {slot: length})
        single = DSparkDrafter(twins.weights, reference)
        single.extend(features)
        expected.append(single.propose(9))
    proposal = drafters.propose([9] * 4).proposal
    name = "DSpark, three stages"
    for quantity, actual in (("logits", proposal.kept), ("confidences", proposal.confidences)):
        wanted = torch.stack([getattr(one, quantity) for one in expected])
        yield line("JAX / torch_ref, drafter", name, quantity, actual, wanted)


def dense_lines(kind: str) -> Iterator[Line]:
    """A drafter in DeepSpec's layout."""
    reference = dense_config(markov_head_type=kind)
    with tempfile.TemporaryDirectory() as folder:
        weights = dense.save(Path(folder), reference)
        cfg, params = load_deepspec(folder)
    features = random_features(dense.TOKENS, 2 * reference.hidden_size, 1)
    slots = np.zeros(dense.TOKENS, int)
    places, kept = np.arange(dense.TOKENS), np.ones(dense.TOKENS, bool)
    context = init_dense_context(cfg, slots=dense.SLOTS, max_len=dense.MAX_LEN)
    context = dense.extend(params, context, features.numpy(), slots, places, kept, cfg=cfg)
    anchors, lengths = np.full(dense.SLOTS, 9), np.full(dense.SLOTS, dense.TOKENS)
    proposal = dense.draft(params, context, anchors, lengths, cfg=cfg)[1]
    drafter = DenseDrafter(weights, reference)
    drafter.extend(features)
    expected = drafter.propose(9)
    for quantity, actual in (("logits", proposal.kept), ("confidences", proposal.confidences)):
        wanted = getattr(expected, quantity)
        yield line("JAX / torch_ref, drafter", f"DeepSpec, {kind}", quantity, actual[0], wanted)


def lines() -> Iterator[Line]:
    """All comparisons."""
    for model, overrides in TARGETS.items():
        yield from target_lines(model, dict(overrides))
    yield from draft_lines()
    for kind in ("vanilla", "gated", "rnn"):
        yield from dense_lines(kind)


def main() -> None:
    """Print the table as it is computed, and the worst of it."""
    print(f"{'compared':26} {'model':50} {'quantity':12} {'largest':>9} {'deviation':>9}")
    worst = 0.0
    for row in lines():
        worst = max(worst, row.difference)
        print(
            f"{row.compared:26} {row.model:50} {row.quantity:12} {row.difference:9.1e} "
            f"{row.deviation:9.2f}",
            flush=True,
        )
    print(f"largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
