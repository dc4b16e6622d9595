"""A tiny target with drafter, whose matrices cross fp8 block edges, and random trees for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from dspark_jax.config import ModelConfig, config_from_dict
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.model.params import Params, param_specs

RAW: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 160,  # one fp8 block and a quarter
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 48,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 8, 4, 0, 0],
    "index_n_heads": 9,
    "index_head_dim": 16,
    "index_topk": 2,
    "max_position_embeddings": 256,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,  # so that gate and up can be joined as fp8
    "num_hash_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "expert_dtype": "fp4",
    "dspark_block_size": 3,
    "dspark_noise_token_id": 95,
    "dspark_target_layer_ids": [1, 3],
    "dspark_markov_rank": 8,
    "dspark_num_stages": 2,
}


def tiny_config(**changes: Any) -> ModelConfig:
    """The configuration above with some keys of its `config.json` changed."""
    return config_from_dict(RAW | changes)


def random_trees(cfg: ModelConfig, seed: int = 0) -> tuple[Params, DraftParams]:
    """Trees of normal float32 values; only what no checkpoint holds keeps its fixed value."""
    rng = np.random.default_rng(seed)

    def draw(spec: Any) -> jax.Array:
        if spec.storage == "i64":
            return jax.numpy.asarray(rng.integers(0, cfg.n_routed_experts, spec.shape, np.int32))
        return jax.numpy.asarray(rng.standard_normal(spec.shape, np.float32))

    is_spec = lambda leaf: hasattr(leaf, "storage")
    params = jax.tree.map(draw, param_specs(cfg), is_leaf=is_spec)
    draft_params = jax.tree.map(draw, draft_specs(cfg), is_leaf=is_spec)
    bias = params.blocks.b_router.at[: cfg.num_hash_layers].set(0)  # table-routed layers have none
    return dataclasses.replace(
        params, blocks=dataclasses.replace(params.blocks, b_router=bias)
    ), draft_params


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
