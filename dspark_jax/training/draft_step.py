"""One step of training a drafter: where it starts, which blocks it sees, and what they cost it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.draft.heads import confidence_logits
from dspark_jax.draft.params import DraftParams, draft_specs
from dspark_jax.model.params import Params, init_params
from dspark_jax.training.draft_forward import (
    base_logits,
    cast_draft,
    gather_window,
    run_blocks,
    sequence_rows,
    transition,
)
from dspark_jax.training.generate import Text
from dspark_jax.training.layers import wide_linear
from dspark_jax.training.losses import DraftLosses, draft_losses
from dspark_jax.training.optimizer import balance, build_optimizer, matrix_axes

_FEATURE_NOISE = 0.3  # of a random projection, added to the copy of the last tap


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """How a drafter is trained."""

    rows: int = 64
    """Sequences per step."""
    anchors: int = 64
    """Blocks per sequence, spread over what the target wrote."""
    peak: float = 3e-3
    """Highest learning rate."""
    warmup: int = 100
    """Steps until it is reached."""
    weight_decay: float = 0.1
    """Decay of matrices, times the learning rate."""
    clip: float = 1.0
    """Largest norm of all gradients together."""
    balance_rate: float = 0.01
    """First step of the routers' selection bias; it falls with the learning rate to a tenth."""
    confidence_gradient: float = 0.2
    """Share of the confidence loss's gradient that reaches the stages: 1 as in DeepSpec, 0 detached."""
    from_target: bool = True
    """Whether the stages start as the target's last layers instead of at random."""
    compute_dtype: str = "bfloat16"
    """Of activations and of the weights they meet. Masters are float32."""
    log_every: int = 100
    """Steps between lines of the log."""
    seed: int = 0
    """Seed of the initial values and of the choice of blocks."""


class DraftState(struct.PyTreeNode):
    """What a step changes."""

    params: DraftParams
    optimizer: Any


class StepResult(NamedTuple):
    """Losses of one step, its gradient's norm and the expert loads [stages, E]."""

    losses: DraftLosses
    gradient_norm: jax.Array
    expert_loads: jax.Array


def initial_draft(
    cfg: ModelConfig, target: Params, key: jax.Array, *, from_target: bool
) -> DraftParams:
    """Float32 parameters to start from.

    With `from_target` the stages are the target's last layers without their compressors, the final collapse and
    norm are the target's, and the context projection passes on mostly the last tap.
    """
    params = init_params(draft_specs(cfg), key)
    if not from_target:
        return params
    stages = len(params.stages.w_kv)

    def copied(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    last = copied(jax.tree.map(lambda x: x[-stages:], target.blocks))
    width = cfg.hidden_size
    passed_on = jnp.eye(width, params.w_main.shape[1], params.w_main.shape[1] - width)
    return params.replace(
        w_main=passed_on + _FEATURE_NOISE * params.w_main,
        stages=last.replace(b_router=jnp.zeros_like(last.b_router)),
        g_norm=copied(target.g_norm),
        hyper_head=copied(target.hyper_head),
    )


def draft_optimizer(cfg: ModelConfig, flags: TrainingFlags) -> optax.GradientTransformation:
    """The target's optimizer; both Markov tables and the confidence row are tables to it, not matrices."""
    axes = matrix_axes(draft_specs(cfg))
    axes = axes.replace(markov_w1=None, markov_w2=None, w_confidence=None)
    return build_optimizer(axes, weight_decay=flags.weight_decay, clip=flags.clip)


def choose_anchors(key: jax.Array, first: jax.Array, last: int, anchors: int) -> jax.Array:
    """One anchor in each of `anchors` equal parts of first[b] ... last: int32 [B, anchors]."""
    place = jnp.arange(anchors) + jax.random.uniform(key, (len(first), anchors))
    span = (last + 1 - first)[:, None]
    at = first[:, None] + jnp.floor(place / anchors * span).astype(jnp.int32)
    return jnp.minimum(at, last)


def block_losses(
    params: DraftParams,
    embed: jax.Array,
    head: jax.Array,
    cfg: ModelConfig,
    text: Text,
    at: jax.Array,
    *,
    dtype: Any,
    markov: float | jax.Array = 1.0,
    confidence_gradient: float = 1.0,
    fused: bool = False,
) -> tuple[DraftLosses, jax.Array]:
    """Losses of the blocks at anchors `at` [B, A] of a text [B, S], and the expert loads [stages, E].

    `markov` 0 leaves the transition out. Every block must end within the row: at + G < S.
    """
    assert cfg.draft is not None
    params = cast_draft(params, cfg, dtype)
    rows = sequence_rows(params, cfg, text.features.taps)
    window, visible = gather_window(rows, at, cfg.sliding_window)
    owner = jnp.arange(len(at))[:, None, None]
    span = at[..., None] + jnp.arange(cfg.draft.block_size)  # [B, A, G]

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(at.size, *x.shape[2:])

    previous = blocks(text.tokens[owner, span])
    states, loads = run_blocks(
        params,
        embed,
        cfg,
        window,
        visible,
        anchors=previous[:, 0],
        positions=at.reshape(-1),
        fused=fused,
    )
    base = base_logits(params, head, cfg, states)
    seen = jax.lax.stop_gradient(states)
    seen = seen + confidence_gradient * (states - seen)
    losses = draft_losses(
        base + markov * transition(params, previous, dtype),
        wide_linear(blocks(text.features.hidden[span, owner]), head),
        blocks(text.tokens[owner, span + 1]),
        confidence_logits(params, seen, previous),
    )
    return losses, loads


def draft_step(
    state: DraftState,
    embed: jax.Array,
    head: jax.Array,
    text: Text,
    key: jax.Array,
    rate: jax.Array,
    balance_rate: jax.Array,
    markov: jax.Array,
    *,
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    flags: TrainingFlags,
    fused: bool,
) -> tuple[DraftState, StepResult]:
    """One step on random sequences of `text` and random anchors in them."""
    assert cfg.draft is not None
    row_key, anchor_key = jax.random.split(key)
    rows = jax.random.randint(row_key, (flags.rows,), 0, len(text.tokens))
    drawn = Text(
        text.tokens[rows],
        text.prompt_lens[rows],
        jax.tree.map(lambda x: x[:, rows], text.features),
    )
    last = text.tokens.shape[1] - 1 - cfg.draft.block_size
    at = choose_anchors(anchor_key, drawn.prompt_lens, last, flags.anchors)

    def loss(params: DraftParams) -> tuple[jax.Array, tuple[DraftLosses, jax.Array]]:
        losses, loads = block_losses(
            params,
            embed,
            head,
            cfg,
            drawn,
            at,
            dtype=embed.dtype,
            markov=markov,
            confidence_gradient=flags.confidence_gradient,
            fused=fused,
        )
        return losses.total, (losses, loads)

    grads, (losses, loads) = jax.grad(loss, has_aux=True)(state.params)
    before: Any = state.params  # the optimiser's types know no trees but their own
    updates, optimizer_state = optimizer.update(grads, state.optimizer, before)
    params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
    bias = balance(params.stages.b_router, loads, balance_rate)
    params = params.replace(stages=params.stages.replace(b_router=bias))
    result = StepResult(losses, optax.tree.norm(grads), loads)
    return DraftState(params=params, optimizer=optimizer_state), result
