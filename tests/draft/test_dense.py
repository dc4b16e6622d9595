"""The drafter in DeepSpec's layout against its PyTorch reference, loaded from files of published names."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dspark_jax.checkpoint.deepspec import load_deepspec
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.config import ConfigError
from dspark_jax.draft.dense import init_dense_context
from tests.draft.dense_drafters import MAX_LEN, SLOTS, TOKENS, draft, extend, published, save
from tests.parity.compare import FLOAT32_MODEL, assert_close
from tests.seeds import fresh_seed
from tests.torch_ref.configs import dense_config, dense_weights, random_features
from torch_ref.checkpoint import save_checkpoint
from torch_ref.dense_draft import DenseDrafter, dense_block
from torch_ref.scope import Scope

VARIANTS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence without the token before": {"confidence_head_with_markov": False},
    "no confidence head": {"enable_confidence_head": False},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_any_pattern_of_acceptance_equals_the_reference(tmp_path, overrides):
    """Four requests from no context on, tokens committed and rejected at random; the context starts as NaN."""
    reference = dense_config(**overrides)
    weights = save(tmp_path, reference)
    cfg, params = load_deepspec(tmp_path)
    context = init_dense_context(cfg, slots=SLOTS, max_len=MAX_LEN, fill=jnp.nan)
    drafters = [DenseDrafter(weights, reference) for _ in range(SLOTS)]
    rng = np.random.default_rng(fresh_seed())
    width = len(reference.target_layer_ids) * reference.hidden_size
    for step in range(5):
        lengths = [drafter.length for drafter in drafters]
        anchors = rng.integers(0, reference.vocab_size, SLOTS)
        hidden, proposal = draft(params, context, anchors, np.array(lengths), cfg=cfg)
        for slot, drafter in enumerate(drafters):
            name, anchor = f"slot {slot} at {drafter.length}", int(anchors[slot])
            block = dense_block(Scope(weights), reference, drafter.context, anchor, drafter.length)
            expected = drafter.propose(anchor)
            assert_close(hidden[slot], block, FLOAT32_MODEL, f"hidden, {name}")
            assert_close(proposal.kept[slot], expected.logits, FLOAT32_MODEL, f"logits, {name}")
            assert proposal.tokens[slot].tolist() == expected.tokens.tolist()
            confidences = expected.confidences
            if confidences is None:
                confidences = torch.ones(reference.block_size)
            assert_close(proposal.confidences[slot], confidences, FLOAT32_MODEL, name)
            logprobs = expected.logits.log_softmax(-1).gather(1, expected.tokens[:, None])
            assert_close(proposal.logprobs[slot], logprobs[:, 0], FLOAT32_MODEL, name)
        features = random_features(TOKENS, width, step)
        slots, positions = np.full(TOKENS, 0), np.full(TOKENS, 0)
        kept = np.zeros(TOKENS, bool)
        for slot, count in zip(rng.permutation(SLOTS), rng.integers(0, 7, SLOTS)):
            first = int(slot) * 6
            here = slice(first, first + count)
            slots[here], positions[here] = slot, lengths[slot] + np.arange(count)
            accepted = int(rng.integers(0, count + 1))
            kept[first : first + accepted] = True
            drafters[slot].extend(features[first : first + accepted])
        context = extend(params, context, features.numpy(), slots, positions, kept, cfg=cfg)
    assert sum(drafter.length for drafter in drafters) > 0


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_every_tensor_matters(tmp_path, kind):
    reference = dense_config(markov_head_type=kind)
    weights = save(tmp_path, reference)
    cfg, params = load_deepspec(tmp_path)
    features = random_features(TOKENS, 2 * reference.hidden_size, 1).numpy()
    slots, places = np.repeat(np.arange(SLOTS), 6), np.tile(np.arange(6), SLOTS)

    def outcome(params):
        context = init_dense_context(cfg, slots=SLOTS, max_len=MAX_LEN)
        kept = np.ones(TOKENS, bool)
        context = extend(params, context, features, slots, places, kept, cfg=cfg)
        proposal = draft(params, context, np.arange(SLOTS), np.full(SLOTS, 6), cfg=cfg)[1]
        return proposal.kept, proposal.confidences

    before = outcome(params)
    leaves, treedef = jax.tree.flatten(params)
    # One leaf per published tensor, those of all layers stacked: none is loaded and forgotten.
    upper_layers = [name for name in weights if name.startswith("layers.1.")]
    assert len(leaves) == len(weights) - len(upper_layers)
    for i, leaf in enumerate(leaves):
        changed = [*leaves]
        changed[i] = leaf + 0.1 * jnp.roll(leaf, 1)
        after = outcome(jax.tree.unflatten(treedef, changed))
        assert any(jnp.abs(a - b).max() > 1e-5 for a, b in zip(after, before)), leaf.shape


def test_dtype_is_chosen_by_the_caller(tmp_path):
    save(tmp_path, dense_config())
    _, params = load_deepspec(tmp_path, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"sample_from_anchor": False}, "sample_from_anchor False"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"markov_head_type": "lstm"}, "lstm"),
        ({"target_layer_ids": [2, 0]}, "increasing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(tmp_path, change, message):
    save(tmp_path, dense_config())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_deepspec(tmp_path)


def test_a_missing_field_or_file_is_named(tmp_path):
    save(tmp_path, dense_config())
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["mask_token_id"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="mask_token_id"):
        load_deepspec(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_deepspec(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_deepspec(tmp_path)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    reference = dense_config(markov_head_type="gated")
    weights = dense_weights(reference, 1)
    del weights["markov_head.gate_proj.bias"]
    weights["fc.weight"] = weights["fc.weight"][:, 1:]
    weights["d2t"] = torch.zeros(5, dtype=torch.int64)
    save_checkpoint(tmp_path, weights, published(reference))
    with pytest.raises(CheckpointError) as error:
        load_deepspec(tmp_path)
    for name in ("markov_head.gate_proj.bias", "fc.weight", "d2t"):
        assert name in str(error.value)


def test_nested_rotary_base_is_read(tmp_path):
    reference = dense_config()
    save(tmp_path, reference)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    path.write_text(json.dumps(raw))
    assert load_deepspec(tmp_path)[0].rope_theta == reference.rope_theta
