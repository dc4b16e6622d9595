"""Training of a drafter on text that the target wrote, with the target's features kept on the device."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from tqdm import tqdm

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
from dspark_jax.training.forward import wide_linear
from dspark_jax.training.generate import Text
from dspark_jax.training.losses import DraftLosses, draft_losses
from dspark_jax.training.optimizer import balance, build_optimizer, learning_rate, matrix_axes

# The number of steps follows from the time of these, once libraries have loaded in the first few.
_TIMED_STEPS = range(10, 50)
_KEEP_BALANCING = 0.1  # of the first rate, at the end of training
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


class Trainer:
    """One compiled step, for several drafters of one shape on the same texts."""

    def __init__(
        self, cfg: ModelConfig, target: Params, texts: Sequence[Text], flags: TrainingFlags
    ):
        if not texts:
            raise ValueError("no text to train on")
        dtype = jnp.dtype(flags.compute_dtype)
        self._cfg, self._target, self._texts, self._flags = cfg, target, texts, flags
        self._embed, self._head = target.embed.astype(dtype), target.head.astype(dtype)
        self._optimizer = draft_optimizer(cfg, flags)
        self._order = np.random.default_rng(flags.seed)
        self._key = jax.random.key(flags.seed)
        step = functools.partial(
            draft_step,
            cfg=cfg,
            optimizer=self._optimizer,
            flags=flags,
            fused=jax.default_backend() == "gpu",
        )
        started = time.perf_counter()
        arguments = self._arguments(0, 1, markov=True)
        # Ahead of time: a jitted step would compile again for the layouts that its first call returned.
        self._step = jax.jit(step, donate_argnums=0).lower(self._initial(), *arguments).compile()
        self.compile_s = time.perf_counter() - started

    def _initial(self) -> DraftState:
        key = jax.random.key(self._flags.seed, impl="rbg")
        start = functools.partial(initial_draft, self._cfg, from_target=self._flags.from_target)
        params = jax.jit(start)(self._target, key)
        return DraftState(params=params, optimizer=jax.jit(self._optimizer.init)(params))

    def _arguments(self, step: int, total: int | None, *, markov: bool) -> tuple[Any, ...]:
        flags = self._flags
        rate = learning_rate(step, total, peak=flags.peak, warmup=flags.warmup)
        fraction = max(rate / flags.peak, _KEEP_BALANCING) if step >= flags.warmup else 1.0
        return (
            self._embed,
            self._head,
            self._texts[int(self._order.integers(len(self._texts)))],
            jax.random.fold_in(self._key, step),
            jnp.float32(rate),
            jnp.float32(flags.balance_rate * fraction),
            jnp.float32(markov),
        )

    def train(
        self,
        log: Callable[[dict[str, Any]], None],
        *,
        seconds: float | None = None,
        steps: int | None = None,
        markov: bool = True,
    ) -> tuple[DraftParams, dict[str, Any]]:
        """Train one drafter from the start for a time or a number of steps.

        Returns its float32 parameters, with the transition zeroed if it was left out, and the last line of the log
        with "steps" and "train_s" of the whole run.
        """
        flags, total, step, line = self._flags, steps, 0, {}
        if steps is None and (seconds is None or flags.warmup < _TIMED_STEPS.stop):
            raise ValueError(
                f"needs steps, or seconds and at least {_TIMED_STEPS.stop} warm-up steps, not {flags.warmup}"
            )
        state = self._initial()
        started = timed_from = time.perf_counter()
        with tqdm(total=total, desc="drafter", unit="step", mininterval=5.0) as bar:
            while total is None or step < total:
                state, result = self._step(state, *self._arguments(step, total, markov=markov))
                step += 1
                bar.update()
                if total is None and step in (_TIMED_STEPS.start, _TIMED_STEPS.stop):
                    jax.block_until_ready(result)
                    now = time.perf_counter()
                    if step == _TIMED_STEPS.stop:
                        assert seconds is not None
                        step_s = (now - timed_from) / len(_TIMED_STEPS)
                        total = step + max(round((seconds - (now - started)) / step_s), 0)
                        bar.total = total
                    timed_from = now
                if step % flags.log_every == 0 or step == total:
                    line = _line(step, result, time.perf_counter() - started)
                    log(line)
                    bar.set_postfix(tv=line["tv"], first=line["acceptance"][0])
                    if not math.isfinite(line["tv"]):
                        raise FloatingPointError(f"loss {line['tv']} at step {step}")
        params = state.params
        if not markov:
            params = params.replace(markov_w2=jnp.zeros_like(params.markov_w2))
        return params, line | {"steps": step, "train_s": time.perf_counter() - started}


def _line(step: int, result: StepResult, seconds: float) -> dict[str, Any]:
    losses = jax.device_get(result.losses)
    loads = np.asarray(result.expert_loads)
    return {
        "step": step,
        "seconds": round(seconds, 2),
        "ce": round(float(losses.ce), 4),
        "tv": round(float(losses.tv), 4),
        "confidence": round(float(losses.confidence), 4),
        "acceptance": [round(float(x), 4) for x in losses.acceptance],
        "confidence_bias": [round(float(x), 4) for x in losses.confidence_bias],
        "gradient_norm": round(float(result.gradient_norm), 4),
        "busiest_expert": round(float(loads.max()), 3),
        "idlest_expert": round(float(loads.min()), 4),
    }


def write_lines(file: TextIO, run: str) -> Callable[[dict[str, Any]], None]:
    """A log that writes JSON lines marked with the name of a run."""

    def write(line: dict[str, Any]) -> None:
        file.write(json.dumps({"run": run, **line}) + "\n")
        file.flush()

    return write
