"""The V4 drafter against its definition written out, and the context of both layouts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parity.compare import EXACT, FLOAT32_MODEL, FLOAT32_UNROLLED, assert_close
from tests.seeds import fresh_seed
from tests.torch_ref.configs import (
    dense_config,
    dense_weights,
    normed,
    random_features,
    tiny_dspark_config,
)
from torch_ref.decode import new_cache, prefill, rollback, step
from torch_ref.dense_draft import DenseDrafter
from torch_ref.draft import DSparkDrafter, draft_block
from torch_ref.model import embed, forward_with_states, run_block, tap_features
from torch_ref.random_weights import random_weights
from torch_ref.scope import Scope

CFG = tiny_dspark_config()


def turned(x: Tensor, positions: list[int], sign: int) -> Tensor:
    """Rotate ``x [S, D]`` as complex numbers made of neighbouring trailing channels."""
    rope_dim = CFG.qk_rope_head_dim
    pairs = torch.view_as_complex(x[:, -rope_dim:].unflatten(-1, (-1, 2)).double().contiguous())
    rates = CFG.rope_theta ** (-torch.arange(rope_dim // 2, dtype=torch.float64) * 2 / rope_dim)
    angles = sign * torch.tensor(positions, dtype=torch.float64)[:, None] * rates
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)
    return torch.cat([x[:, :-rope_dim], turned.float()], dim=-1)


def attention_written_out(weights, stage: int, x: Tensor, features: Tensor) -> Tensor:
    """Attention of a draft stage from its definition, head by head; ``x [G, C]``.

    ``features`` are those of all committed tokens, so the anchor is at position len(features).
    """

    def w(name: str) -> Tensor:
        return weights[f"mtp.{stage}.attn.{name}"]

    anchor_position = len(features)
    first = max(0, anchor_position - CFG.sliding_window)
    context = normed(
        features[first:] @ weights["mtp.0.main_proj.weight"].T, weights["mtp.0.main_norm.weight"]
    )
    block_positions = list(range(anchor_position, anchor_position + len(x)))
    keys = normed(torch.cat([context, x]) @ w("wkv.weight").T, w("kv_norm.weight"))
    keys = turned(keys, [*range(first, anchor_position), *block_positions], +1)
    latent = normed(x @ w("wq_a.weight").T, w("q_norm.weight"))
    outputs = []
    for head in range(CFG.num_attention_heads):
        rows = slice(head * CFG.head_dim, (head + 1) * CFG.head_dim)
        queries = turned(normed(latent @ w("wq_b.weight")[rows].T), block_positions, +1)
        scores = (queries @ keys.T / CFG.head_dim**0.5).exp()
        total = scores.sum(-1, keepdim=True) + w("attn_sink")[head].exp()
        outputs.append(turned(scores / total @ keys, block_positions, -1))
    width = CFG.num_attention_heads // CFG.o_groups
    low_rank = [
        torch.cat(outputs[group * width : (group + 1) * width], -1) @ matrix.T
        for group, matrix in enumerate(w("wo_a.weight").split(CFG.o_lora_rank))
    ]
    return torch.cat(low_rank, -1) @ w("wo_b.weight").T


@pytest.mark.parametrize("num_committed", [0, 1, 5, 8, 9, 21])
def test_block_attention_written_out(num_committed):
    """Anchor at the number of committed tokens, no context row there, 8 rows of context."""
    weights = random_weights(CFG, 1)
    features = random_features(num_committed, 3 * CFG.hidden_size, 2)
    drafter = DSparkDrafter(weights, CFG)
    drafter.extend(features)
    anchor = 17
    block = torch.tensor([[anchor, *[CFG.dspark_noise_token_id] * 4]])
    streams = embed(Scope(weights), CFG, block)
    for stage in range(CFG.dspark_num_stages):
        attend = lambda _, x, stage=stage: attention_written_out(weights, stage, x[0], features)[
            None
        ]
        streams = run_block(Scope(weights).at(f"mtp.{stage}"), CFG, streams, attend, None)
    flat = normed(streams[0].flatten(1)) @ weights["mtp.2.hc_head_fn"].T
    mix = torch.sigmoid(flat * weights["mtp.2.hc_head_scale"] + weights["mtp.2.hc_head_base"])
    expected = ((mix + CFG.hc_eps)[..., None] * streams[0]).sum(1)
    hidden = draft_block(Scope(weights), CFG, drafter.visible_context(), anchor, num_committed)
    assert_close(hidden, expected, FLOAT32_MODEL)

    proposal = drafter.propose(anchor)
    base = normed(expected, weights["mtp.2.norm.weight"]) @ weights["head.weight"].T
    w1, w2 = (weights[f"mtp.2.markov_head.markov_w{i}.weight"] for i in (1, 2))
    previous = [anchor, *proposal.tokens[:-1].tolist()]
    assert_close(proposal.logits, base + w1[previous] @ w2.T, FLOAT32_MODEL)
    assert proposal.tokens.tolist() == proposal.logits.argmax(-1).tolist()
    features = torch.cat([expected, w1[previous]], -1)
    confidence = features @ weights["mtp.2.confidence_head.proj.weight"][0]
    assert_close(proposal.confidences, torch.sigmoid(confidence), FLOAT32_MODEL)


def test_window_of_context():
    """The last ``sliding_window`` committed tokens count, and not one before them."""
    weights = random_weights(CFG, 3)
    features = random_features(20, 3 * CFG.hidden_size, 4)

    def logits(changed: int | None = None) -> Tensor:
        inputs = features.clone()
        if changed is not None:
            inputs[changed] = random_features(1, inputs.shape[1], 5)
        drafter = DSparkDrafter(weights, CFG)
        for piece in inputs.split(3):
            drafter.extend(piece)
        return drafter.propose(9).logits

    assert torch.equal(logits(changed=20 - CFG.sliding_window - 1), logits())
    assert (logits(changed=20 - CFG.sliding_window) - logits()).abs().max() > 1e-3
    assert (logits(changed=19) - logits()).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["mtp", "dense"])
def test_context_after_any_acceptance_equals_recomputation(layout):
    seed = fresh_seed()
    rng = random.Random(seed)
    weights = random_weights(CFG, seed)
    drafter = DSparkDrafter(weights, CFG)
    again = DSparkDrafter(weights, CFG)
    if layout == "dense":
        dense = dense_config(hidden_size=CFG.hidden_size)
        drafter = DenseDrafter(dense_weights(dense, seed), dense)
        again = DenseDrafter(dense_weights(dense, seed), dense)
    tokens = [rng.randrange(CFG.vocab_size) for _ in range(41)]
    _, states = forward_with_states(weights, CFG, torch.tensor([tokens]))
    expected = tap_features(states, drafter.target_layer_ids)[0]
    cache = new_cache(CFG, 60, 6)
    _, states = prefill(weights, CFG, cache, tokens[:11])
    drafter.extend(tap_features(states, drafter.target_layer_ids)[0])
    while cache.length < 35:
        start = cache.length
        verify_len = rng.randint(0, 5)
        accept_len = rng.randint(0, verify_len)
        rejected = [rng.randrange(CFG.vocab_size) for _ in range(verify_len - accept_len)]
        _, states = step(
            weights, CFG, cache, tokens[start : start + 1 + accept_len] + rejected, start
        )
        rollback(cache, start + 1 + accept_len)
        features = tap_features(states, drafter.target_layer_ids)[0, : 1 + accept_len]
        drafter.extend(features)
        assert drafter.length == cache.length
    again.extend(expected[: cache.length])
    if layout == "mtp":
        assert_close(drafter.visible_context(), again.visible_context(), FLOAT32_UNROLLED)
    else:
        for pair, expected_pair in zip(drafter.context, again.context):
            assert_close(torch.stack(pair), torch.stack(expected_pair), FLOAT32_UNROLLED)
    ours, theirs = drafter.propose(tokens[cache.length]), again.propose(tokens[cache.length])
    assert_close(ours.logits[0], theirs.logits[0], FLOAT32_UNROLLED)


def test_tap_is_the_mean_of_a_layers_output_streams():
    weights = random_weights(CFG, 6)
    _, states = forward_with_states(weights, CFG, torch.arange(10)[None])
    features = tap_features(states, (-1, 2))
    assert_close(features[0, :, : CFG.hidden_size], weights["embed.weight"][:10], EXACT)
    by_hand = sum(states[3][:, :, n] for n in range(CFG.hc_mult)) / CFG.hc_mult
    assert_close(features[..., CFG.hidden_size :], by_hand, FLOAT32_MODEL)


def test_every_slot_sees_the_later_slots():
    weights = random_weights(CFG, 7)
    context = torch.zeros(3, 0, CFG.head_dim)
    longer = replace(CFG, dspark_block_size=6)
    short, long = (draft_block(Scope(weights), cfg, context, 9, 4) for cfg in (CFG, longer))
    assert ((short - long[:5]).abs().amax(-1) > 1e-4).all()


def test_confidence_ignores_its_own_token():
    weights = random_weights(CFG, 8)
    drafter = DSparkDrafter(weights, CFG)
    drafter.extend(random_features(4, 3 * CFG.hidden_size, 9))
    one = drafter.propose(5, lambda slot, logits: 20 + slot)
    other = drafter.propose(5, lambda slot, logits: 90 if slot == 2 else 20 + slot)
    same = one.confidences == other.confidences
    assert same.tolist() == [True, True, True, False, True]
    assert torch.equal(one.logits[:3], other.logits[:3])
    assert not torch.equal(one.logits[3], other.logits[3])


def test_a_model_without_stages_has_no_drafter():
    with pytest.raises(ValueError, match="no DSpark stages"):
        DSparkDrafter({}, replace(CFG, dspark_num_stages=0))
