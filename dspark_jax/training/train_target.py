"""Training of the bundled target: `python -m dspark_jax.training.train_target`.

On a GPU set `XLA_FLAGS=--xla_gpu_autotune_level=0`: choosing kernels by measurement costs more than it gains in a
run of a few minutes.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import struct
from tqdm import tqdm

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.config import ModelConfig
from dspark_jax.model.params import Params, init_params
from dspark_jax.training.data import RowSampler, gather_rows, load_streams
from dspark_jax.training.forward import SequenceOutput, trainable_specs
from dspark_jax.training.master import save_master
from dspark_jax.training.optimizer import balance, build_optimizer, learning_rate, matrix_axes
from dspark_jax.training.preset import bundled_config
from dspark_jax.training.report import plain_flags, write_report
from dspark_jax.training.target_loss import cross_entropy, evaluate_target, run

# The number of steps follows from the time of these, once libraries have loaded in the first few.
_TIMED_STEPS = range(10, 50)
_KEEP_BALANCING = 0.1  # of the first rate, at the end of training


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Train the target on the corpus and export it in the released formats."""

    tokens: Path = Path("out/tokens")
    """Folder written by `dspark_jax.training.tokenizer`."""
    out: Path = Path("out/target")
    """Folder for the checkpoint, log.jsonl and metrics.json."""
    max_minutes: float = 5.0
    """Time for the steps, without compiling and evaluation. The number of steps is measured from it."""
    steps: int | None = None
    """Exact number of steps instead; with the seed and the machine it reproduces a run."""
    batch: int = 8
    """Sequences per step."""
    length: int = 2048
    """Tokens per sequence."""
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
    select_after: float = 0.3
    """Share of the steps in which CSA layers attend to all entries, before the indexer's choice counts."""
    compute_dtype: str = "bfloat16"
    """Of activations and of the weights they meet. Masters are float32."""
    log_every: int = 50
    """Steps between lines of the log."""
    seed: int = 0
    """Seed of the initial values and of the order of the rows."""


class TrainState(struct.PyTreeNode):
    """What a step changes. `params.tid2eid` is None; the table is fixed."""

    params: Params
    optimizer: Any


class Losses(NamedTuple):
    """Means of one step, float32 scalars but the loads."""

    nats: jax.Array
    index_kl: jax.Array
    gradient_norm: jax.Array
    expert_loads: jax.Array  # [L, E]


def hash_table(counts: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    """Experts int32 [hash layers, V, k] of every token id, so that frequent ids spread evenly.

    `counts` [V] are the ids' frequencies. Ids are dealt in falling frequency to the least loaded experts; each
    layer deals with a different tie order.
    """
    table = np.zeros((cfg.num_hash_layers, cfg.vocab_size, cfg.num_experts_per_tok), np.int32)
    for layer in range(cfg.num_hash_layers):
        load = np.random.default_rng(layer).random(cfg.n_routed_experts)
        for token in np.argsort(-counts, kind="stable"):
            chosen = np.argsort(load, kind="stable")[: cfg.num_experts_per_tok]
            table[layer, token] = chosen
            load[chosen] += counts[token] + 1
    return table


def train_step(
    state: TrainState,
    table: jax.Array | None,
    tokens: jax.Array,
    starts: jax.Array,
    rate: jax.Array,
    balance_rate: jax.Array,
    select: jax.Array,
    *,
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    length: int,
    dtype: Any,
) -> tuple[TrainState, Losses]:
    """One step on the rows that begin at `starts` [B] in `tokens` [N]."""
    ids, labels = gather_rows(tokens, starts, length, cfg.bos_token_id)

    def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, SequenceOutput]]:
        out, predicted = run(params, table, cfg, ids, dtype=dtype, select=select)
        nats = jnp.mean(cross_entropy(predicted, labels))
        # The indexer's divergence reaches no other parameter, so its weight is free.
        return nats + jnp.sum(out.index_kl), (nats, out)

    grads, (nats, out) = jax.grad(loss, has_aux=True)(state.params)
    before: Any = state.params  # the optimiser's types know no trees but their own
    updates, optimizer_state = optimizer.update(grads, state.optimizer, before)
    params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
    scored = slice(cfg.num_hash_layers, None)
    bias = params.blocks.b_router
    bias = bias.at[scored].set(balance(bias[scored], out.expert_loads[scored], balance_rate))
    params = params.replace(blocks=params.blocks.replace(b_router=bias))
    return TrainState(params=params, optimizer=optimizer_state), Losses(
        nats=nats,
        index_kl=jnp.mean(out.index_kl),
        gradient_norm=optax.tree.norm(grads),
        expert_loads=out.expert_loads,
    )


def train(flags: TargetFlags, cfg: ModelConfig) -> tuple[Params, dict[str, Any]]:
    """Train from scratch; returns the float32 parameters and what is to be reported."""
    if flags.steps is None and flags.warmup < _TIMED_STEPS.stop:
        raise ValueError(
            f"warmup {flags.warmup} must be at least {_TIMED_STEPS.stop} without steps"
        )
    flags.out.mkdir(parents=True, exist_ok=True)
    dtype = jnp.dtype(flags.compute_dtype)
    streams = load_streams(flags.tokens, "train")
    sampler = RowSampler(streams, flags.length, flags.seed)
    counts = np.bincount(sampler.tokens, minlength=cfg.vocab_size)
    table = jnp.asarray(hash_table(counts, cfg))
    specs = trainable_specs(cfg)
    optimizer = build_optimizer(
        matrix_axes(specs), weight_decay=flags.weight_decay, clip=flags.clip
    )
    # "rbg" keys: the default generator, drawn for every leaf in one program, takes minutes to compile on a CPU.
    params = jax.jit(lambda key: init_params(specs, key))(jax.random.key(flags.seed, impl="rbg"))
    state = TrainState(params=params, optimizer=jax.jit(optimizer.init)(params))
    tokens = jnp.asarray(sampler.tokens)

    started = time.perf_counter()
    step_fn = functools.partial(
        train_step, cfg=cfg, optimizer=optimizer, length=flags.length, dtype=dtype
    )

    def arguments(step: int, total: int | None) -> tuple[Any, ...]:
        rate = learning_rate(step, total, peak=flags.peak, warmup=flags.warmup)
        fraction = max(rate / flags.peak, _KEEP_BALANCING) if step >= flags.warmup else 1.0
        select = total is not None and step >= flags.select_after * total
        return (
            table,
            tokens,
            sampler.starts(flags.batch),
            jnp.float32(rate),
            jnp.float32(flags.balance_rate * fraction),
            jnp.asarray(select),
        )

    # Ahead of time: the second call of a jitted step would compile again for the layouts the first one returned.
    compiled = jax.jit(step_fn, donate_argnums=0).lower(state, *arguments(0, 1)).compile()
    compile_s = time.perf_counter() - started
    tqdm.write(f"compiled in {compile_s:.1f} s")

    state, steps, wall_s, last = run_steps(flags, compiled, state, arguments)
    tokens_per_s = steps * flags.batch * flags.length / wall_s
    report = {
        "flags": plain_flags(flags),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "steps": steps,
        "tokens": steps * flags.batch * flags.length,
        "train_tokens": {kind: len(stream.tokens) for kind, stream in streams.items()},
        "compile_s": compile_s,
        "train_s": wall_s,
        "tokens_per_s": tokens_per_s,
        "last": last,
    }
    return state.params.replace(tid2eid=table), report


def run_steps(
    flags: TargetFlags,
    compiled: Callable[..., tuple[Any, Losses]],
    state: Any,
    arguments: Callable[[int, int | None], tuple[Any, ...]],
) -> tuple[Any, int, float, dict[str, Any]]:
    """Call `compiled(state, *arguments(step, total))` for all steps; `total` is None until it is known.

    Returns the last state, the number of steps, their seconds, and the last line of the log.
    """
    total, step, line = flags.steps, 0, {}
    started = timed_from = time.perf_counter()
    with (
        (flags.out / "log.jsonl").open("w") as log,
        tqdm(total=total, desc="target", unit="step", mininterval=2.0) as bar,
    ):
        while total is None or step < total:
            state, losses = compiled(state, *arguments(step, total))
            step += 1
            bar.update()
            if total is None and step in (_TIMED_STEPS.start, _TIMED_STEPS.stop):
                jax.block_until_ready(losses)
                now = time.perf_counter()
                if step == _TIMED_STEPS.stop:
                    step_s = (now - timed_from) / len(_TIMED_STEPS)
                    total = step + max(round((60 * flags.max_minutes - now + started) / step_s), 0)
                    bar.total = total
                timed_from = now
            if step % flags.log_every == 0 or step == total:
                line = _line(step, losses, time.perf_counter() - started)
                log.write(json.dumps(line) + "\n")
                bar.set_postfix(nats=f"{line['nats']:.3f}", kl=f"{line['index_kl']:.3f}")
                if not math.isfinite(line["nats"]):
                    raise FloatingPointError(f"loss {line['nats']} at step {step}")
    return state, step, time.perf_counter() - started, line


def _line(step: int, losses: Losses, seconds: float) -> dict[str, Any]:
    loads = np.asarray(losses.expert_loads)
    return {
        "step": step,
        "seconds": round(seconds, 2),
        "nats": round(float(losses.nats), 4),
        "index_kl": round(float(losses.index_kl), 4),
        "gradient_norm": round(float(losses.gradient_norm), 4),
        "busiest_expert": round(float(loads.max()), 3),
        "idlest_expert": round(float(loads.min()), 4),
    }


def main(flags: TargetFlags) -> None:
    """Train, export, and evaluate on held-out text before and after rounding to the released formats."""
    cfg = bundled_config()
    params, report = train(flags, cfg)
    save_master(flags.out, params)
    checkpoint = flags.out / "checkpoint"
    export_checkpoint(checkpoint, cfg, params, None)
    judge = functools.partial(
        evaluate_target,
        cfg=cfg,
        tokens=flags.tokens,
        length=flags.length,
        dtype=jnp.dtype(flags.compute_dtype),
    )
    report["held_out"] = judge(params, against_unigram=True)
    _, rounded, _ = load_checkpoint(checkpoint)
    report["held_out_rounded"] = judge(rounded, against_unigram=False)
    report["checkpoint_bytes"] = sum(file.stat().st_size for file in checkpoint.iterdir())
    write_report(flags.out / "metrics.json", report)
    tqdm.write(json.dumps(report, indent=2))


if __name__ == "__main__":
    main(tyro.cli(TargetFlags))
