"""Parameters of the DSpark drafter in the released layout (`mtp.*`)."""

from __future__ import annotations

import jax
from flax import struct

from dspark_jax.config import ConfigError, ModelConfig
from dspark_jax.kernels.quantized import Weight, by_column
from dspark_jax.model.params import (
    Block,
    HyperHead,
    block_by_column,
    block_specs,
    hyper_head_specs,
    leaf_spec,
)


class DraftParams(struct.PyTreeNode):
    """Drafter stages and heads. Embedding and output head are the target's."""

    w_main: Weight  # [M, taps*M] context projection of the target's features
    g_main: jax.Array  # [M]
    stages: Block  # [stages, ...], score-routed, sliding attention only
    g_norm: jax.Array  # [M]
    hyper_head: HyperHead
    markov_w1: jax.Array  # [V, r] row of the previous token
    markov_w2: jax.Array  # [V, r] to transition logits
    w_confidence: jax.Array  # [1, M + r] hidden first, Markov row second
    # Sequential temperature scaling: conditional confidence = sigmoid(scale_k * z_k + offset_k).
    calibration_scale: jax.Array  # [block_size] float32
    calibration_offset: jax.Array  # [block_size] float32


def draft_specs(cfg: ModelConfig) -> DraftParams:
    """Specifications of the drafter described by `cfg.draft`, in the structure of `DraftParams`."""
    if cfg.draft is None:
        raise ConfigError("this checkpoint has no DSpark drafter (config.json lacks dspark_* keys)")
    c, v, r, g = cfg.hidden_size, cfg.vocab_size, cfg.draft.markov_rank, cfg.draft.block_size
    taps = len(cfg.draft.target_layer_ids)
    return DraftParams(
        w_main=leaf_spec((c, taps * c), ("model", None), "fp8"),
        g_main=leaf_spec((c,), ("model",), "bf16", "one"),
        stages=block_specs(cfg, cfg.draft.num_stages),
        g_norm=leaf_spec((c,), ("model",), "bf16", "one"),
        hyper_head=hyper_head_specs(cfg),
        markov_w1=leaf_spec((v, r), (None, None), "bf16"),
        markov_w2=leaf_spec((v, r), (None, None), "bf16"),
        w_confidence=leaf_spec((1, c + r), (None, None), "bf16"),
        calibration_scale=leaf_spec((g,), (None,), "f32", "one"),
        calibration_offset=leaf_spec((g,), (None,), "f32", "zero"),
    )


def context_params(params: DraftParams) -> DraftParams:
    """Only what `backbone.context_rows` reads, None elsewhere: a call costs the host microseconds per array."""
    stages = params.stages
    return jax.tree.map(lambda leaf: None, params).replace(
        w_main=params.w_main,
        g_main=params.g_main,
        stages=jax.tree.map(lambda leaf: None, stages).replace(w_kv=stages.w_kv, g_kv=stages.g_kv),
    )


def draft_by_column(params: DraftParams) -> DraftParams:
    """The same drafter with its float32 matrices as `by_column` keeps them: what a CPU serves with.

    Those that make context rows stay float32: every step of one request multiplies one row by them, even while the
    drafter rests, which takes four times as long from two bytes a value.
    """
    stages = params.stages.replace(w_kv=by_column(params.stages.w_kv, is_wide=True))
    return params.replace(
        w_main=by_column(params.w_main, is_wide=True),
        stages=block_by_column(stages),
        markov_w2=by_column(params.markov_w2),
    )
