"""A tiny target with a drafter that often agrees with it, and ordinary greedy decoding by the reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import torch

from dspark_jax.decode.step import ModelParams
from tests.parity.bridge import to_jax
from tests.parity.target import Twins
from tests.torch_ref.configs import normed, tiny_dspark_config
from torch_ref.model import forward
from torch_ref.random_weights import random_weights

DRAFT_LEN = 4
VOCAB = 64


@cache
def agreeing_twins() -> Twins:
    """Random weights whose next token depends mostly, but not only, on the last one.

    The drafter's transition head knows that part. So some drafts are accepted and some rejected, which unrelated
    random models would make a rarity of the first.
    """
    reference = tiny_dspark_config(
        vocab_size=VOCAB,
        compress_ratios=(4, 8),
        dspark_target_layer_ids=(0, 1),
        dspark_block_size=DRAFT_LEN,
        dspark_num_stages=1,
        dspark_markov_rank=64,
    )
    weights = random_weights(reference, seed=5)
    weights["embed.weight"] *= 16
    for name in weights:
        if name.endswith(("wo_b.weight", ".w2.weight")):
            weights[name] *= 0.4
    weights["mtp.0.norm.weight"] *= 0.15
    weights["mtp.0.markov_head.markov_w1.weight"] = normed(
        weights["embed.weight"], weights["norm.weight"]
    )
    weights["mtp.0.markov_head.markov_w2.weight"] = weights["head.weight"].clone()
    weights["mtp.0.confidence_head.proj.weight"] *= 0.2
    return Twins(reference, weights, *to_jax(weights, reference.to_released()))


def model_params(twins: Twins, *, drafter: bool = True) -> ModelParams:
    """The JAX weights as a step takes them."""
    return ModelParams(target=twins.params, draft=twins.draft_params if drafter else None)


def greedy_text(
    twins: Twins,
    prompt: Sequence[int],
    count: int,
    *,
    stop_ids: Collection[int] = (),
    min_len: int = 0,
) -> list[int]:
    """Ordinary greedy decoding of `count` tokens without a cache, ending with the first stop id.

    The stop ids cannot be drawn before the whole text has `min_len` tokens.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = forward(twins.weights, twins.reference, torch.tensor([tokens]))[0, -1]
        if len(tokens) < min_len:
            logits[list(stop_ids)] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
