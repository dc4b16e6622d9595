"""Training of a drafter on text that the target wrote, with the target's features kept on the device."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.config import ModelConfig
from dspark_jax.draft.params import DraftParams
from dspark_jax.model.params import Params
from dspark_jax.training.draft_step import (
    DraftState,
    StepResult,
    TrainingFlags,
    draft_optimizer,
    draft_step,
    initial_draft,
)
from dspark_jax.training.generate import Text
from dspark_jax.training.optimizer import learning_rate

# The number of steps follows from the time of these, once libraries have loaded in the first few.
_TIMED_STEPS = range(10, 50)
_KEEP_BALANCING = 0.1  # of the first rate, at the end of training


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

    def _initial(self, given: DraftParams | None = None) -> DraftState:
        params = given or self._fresh()
        return DraftState(params=params, optimizer=jax.jit(self._optimizer.init)(params))

    def _fresh(self) -> DraftParams:
        key = jax.random.key(self._flags.seed, impl="rbg")
        start = functools.partial(initial_draft, self._cfg, from_target=self._flags.from_target)
        return jax.jit(start)(self._target, key)

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
        initial: DraftParams | None = None,
    ) -> tuple[DraftParams, dict[str, Any]]:
        """Train one drafter for a time or a number of steps, from float32 parameters if any are given.

        Returns its float32 parameters, with the transition zeroed if it was left out, and the last line of the log
        with "steps" and "train_s" of the whole run.
        """
        flags, total, step, line = self._flags, steps, 0, {}
        if steps is None and (seconds is None or flags.warmup < _TIMED_STEPS.stop):
            raise ValueError(
                f"needs steps, or seconds and at least {_TIMED_STEPS.stop} warm-up steps, not {flags.warmup}"
            )
        state = self._initial(initial)
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
