"""The target's training step learns, balances its experts and keeps its promises about schedule and table."""

from __future__ import annotations

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.training.data import KINDS, load_streams, unigram_nats
from dspark_jax.training.forward import trainable_specs
from dspark_jax.training.optimizer import balance, learning_rate, matrix_axes
from dspark_jax.training.target_loss import held_out_losses
from dspark_jax.training.tokenizer import save_stream
from dspark_jax.training.train_target import (
    Losses,
    TargetFlags,
    hash_table,
    run_steps,
    train,
)
from tests.training.tiny import SHALLOW


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A language in which each id has two possible successors: its entropy is ln 2 per token."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = np.random.default_rng(0)
    successors = draw.integers(3, SHALLOW.vocab_size - 1, (SHALLOW.vocab_size, 2))
    for side, documents in (("train", 200), ("held_out", 10)):
        for kind in KINDS:
            rows = []
            for _ in range(documents):
                row = [0]
                while len(row) < 60:
                    row.append(int(successors[row[-1], draw.integers(2)]))
                rows.append(row)
            save_stream(folder / f"{side}_{kind}.npz", rows, num_bytes=180 * documents)
    return folder


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    flags = TargetFlags(
        tokens=tokens,
        out=tmp_path_factory.mktemp("target"),
        steps=150,
        batch=8,
        length=32,
        peak=1e-2,
        warmup=10,
        compute_dtype="float32",
        log_every=10,
    )
    return flags, *train(flags, SHALLOW)


def test_training_reaches_the_entropy_of_the_text(trained, tokens):
    _, params, _ = trained
    held_out = load_streams(tokens, "held_out")
    losses = held_out_losses(
        params.replace(tid2eid=None),
        params.tid2eid,
        SHALLOW,
        held_out,
        length=32,
        dtype=jnp.float32,
    )
    for kind, stream in held_out.items():
        unigram = unigram_nats(load_streams(tokens, "train"), stream, SHALLOW.vocab_size)
        assert unigram > 3
        assert math.log(2) - 0.05 < losses[kind]["nats"] < 1.2
        assert losses[kind]["perplexity"] == pytest.approx(math.exp(losses[kind]["nats"]))
        bits = losses[kind]["nats"] * 599 / math.log(2) / 1800
        assert losses[kind]["bits_per_byte"] == pytest.approx(bits)


def test_log_shows_falling_loss_and_busy_experts(trained):
    flags, _, report = trained
    lines = [json.loads(line) for line in (flags.out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 151, 10))
    assert lines[-1]["nats"] < lines[0]["nats"] - 1
    assert lines[-1]["idlest_expert"] > 0.05
    assert report["steps"] == 150
    assert report["tokens"] == 150 * 8 * 32


def test_trained_model_survives_export(trained, tokens, tmp_path):
    _, params, _ = trained
    export_checkpoint(tmp_path, SHALLOW, params, None)
    _, loaded, _ = load_checkpoint(tmp_path)
    held_out = {"chat": load_streams(tokens, "held_out")["chat"]}
    nats = [
        held_out_losses(
            p.replace(tid2eid=None), p.tid2eid, SHALLOW, held_out, length=32, dtype=jnp.float32
        )["chat"]["nats"]
        for p in (params, loaded)
    ]
    assert nats[0] != nats[1]
    assert abs(nats[0] - nats[1]) < 0.3


def test_noise_row_and_router_bias_keep_their_promises(trained):
    _, params, _ = trained
    noise = params.embed[SHALLOW.draft.noise_token_id]
    assert float(jnp.linalg.norm(noise)) > 0.5
    bias = np.asarray(params.blocks.b_router)
    assert (bias[: SHALLOW.num_hash_layers] == 0).all()
    np.testing.assert_allclose(bias.mean(-1), 0, atol=1e-6)
    assert np.abs(bias[SHALLOW.num_hash_layers :]).max() > 0


def test_budget_in_minutes_sets_the_number_of_steps(tmp_path):
    losses = Losses(
        nats=jnp.float32(1),
        index_kl=jnp.float32(0),
        gradient_norm=jnp.float32(1),
        expert_loads=jnp.ones((1, 4)) / 4,
    )

    def step(state, at, total):
        time.sleep(0.005)
        return state + [(at, total)], losses

    flags = TargetFlags(out=tmp_path, max_minutes=0.02, warmup=50)
    calls, steps, seconds, last = run_steps(flags, step, [], lambda *known: known)
    assert [at for at, _ in calls] == list(range(steps))
    assert [total for _, total in calls] == [None] * 50 + [steps] * (steps - 50)
    assert 100 < steps <= 240
    assert seconds > 0.6
    assert last["step"] == steps


def test_hash_table_deals_frequent_ids_evenly():
    counts = 10_000 // np.arange(1, SHALLOW.vocab_size + 1)
    table = hash_table(counts, SHALLOW)
    load = np.zeros(SHALLOW.n_routed_experts)
    for token, chosen in enumerate(table[0]):
        assert len(set(chosen)) == SHALLOW.num_experts_per_tok
        load[chosen] += counts[token]
    assert load.max() / load.mean() < 1.1


def test_schedule():
    rates = [learning_rate(s, 100, peak=2.0, warmup=10) for s in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == 2.0 == rates[9]
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0)
    assert learning_rate(3, None, peak=2.0, warmup=10) == rates[3]
    with pytest.raises(ValueError, match="must be known"):
        learning_rate(10, None, peak=2.0, warmup=10)


def test_balance_moves_load_and_keeps_the_mean():
    loads = jnp.array([[0.7, 0.1, 0.1, 0.1]])
    moved = balance(jnp.array([[0.5, 0.5, 0.5, 0.5]]), loads, 0.01)
    np.testing.assert_allclose(moved, [[-0.015, 0.005, 0.005, 0.005]], atol=1e-7)


def test_tables_over_the_vocabulary_are_no_matrices():
    axes = matrix_axes(trainable_specs(SHALLOW))
    assert axes.embed is None
    assert axes.head is None
    assert axes.blocks.attn_sink is None
    assert axes.csa.ape is None
    matrices = [
        a for a in jax.tree.leaves(axes.blocks, is_leaf=lambda x: hasattr(x, "output_axis"))
    ]
    assert len(matrices) == 12
    assert {(a.reduction_axis, a.output_axis) for a in matrices} == {(-1, -2)}
