"""The drafter in DeepSpec's layout, four requests at a time, as the tests and the parity report drive it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch

from dspark_jax.draft.dense import extend_dense_context, propose_dense, run_dense_block
from dspark_jax.draft.propose import token_logprobs
from tests.quick_jit import quick_jit
from tests.torch_ref.configs import dense_weights
from torch_ref.checkpoint import save_checkpoint
from torch_ref.dense_draft import DenseDraftConfig

SLOTS = 4
TOKENS = 24
MAX_LEN = 40


def published(cfg: DenseDraftConfig) -> dict[str, Any]:
    """Content of a drafter's `config.json`."""
    return {
        **vars(cfg),
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": ["full_attention"] * cfg.num_hidden_layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_target_layers": 36,
    }


def save(folder: Path, cfg: DenseDraftConfig, seed: int = 1) -> dict[str, torch.Tensor]:
    weights = dense_weights(cfg, seed)
    save_checkpoint(folder, weights, published(cfg))
    return weights


@partial(quick_jit, static_argnames="cfg")
def extend(params, context, features, slots, positions, kept, *, cfg):
    return extend_dense_context(
        params, cfg, context, features, slots=slots, positions=positions, kept=kept
    )


@partial(quick_jit, static_argnames="cfg")
def draft(params, context, anchors, positions, *, cfg):
    where = {"anchors": anchors, "positions": positions, "slots": jnp.arange(SLOTS)}
    hidden = run_dense_block(params, cfg, context, **where)

    def choose(logits, k, drafted, kept):
        token = jnp.argmax(logits, axis=-1)
        return token, token_logprobs(logits, token), kept.at[:, k].set(logits)

    where |= {"choose": choose, "kept": jnp.zeros((*hidden.shape[:2], cfg.vocab_size))}
    return hidden, propose_dense(params, cfg, context, **where)
