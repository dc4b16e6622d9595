"""Bytes and operations of a step, against the weights themselves and against numbers worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.flash_memory import main as flash_memory
from benchmarks.flash_model import FLASH, overrides_for
from benchmarks.step_floor import (
    Options,
    Work,
    draft_work,
    expected_experts,
    measured_curves,
    tables,
    verify_work,
)
from dspark_jax.checkpoint.dummy import abstract_params
from dspark_jax.config import ConfigError, config_from_dict, load_config
from tests.kernels.flash import FLASH as TESTED_FLASH

CFG = load_config(FLASH)


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_the_model_is_the_released_one():
    assert config_from_dict(TESTED_FLASH) == CFG


@pytest.mark.parametrize("layers", [None, 30, 3])
def test_counted_weights_are_those_of_the_tree(layers):
    cfg = load_config(FLASH, overrides_for(FLASH, layers=layers, draft_len=7))
    target, draft = abstract_params(cfg, dtype=jnp.bfloat16, keep_quantized=True)
    experts = size([target.blocks.w_gate_up, target.blocks.w_down])
    fixed = size(target) - experts - size([target.embed, target.tid2eid])
    context = size([draft.w_main, draft.stages.w_kv])
    nothing = verify_work(cfg, tokens=0, requests=0, context_len=2000, logit_rows=0)
    counted = sum(nothing.values(), Work()).num_bytes
    assert counted == pytest.approx(fixed + context, rel=2e-3)
    # So many tokens choose every expert.
    crowd = verify_work(cfg, tokens=10**6, requests=1, context_len=2000, logit_rows=1)
    moved = 4 * 10**6 * cfg.hidden_size * cfg.num_hidden_layers
    assert crowd["experts"].num_bytes - moved == pytest.approx(experts, rel=1e-6)


def test_operations_by_hand():
    cfg = load_config(FLASH, overrides_for(FLASH, layers=5, draft_len=7))  # kinds 0 0 4 128 4
    parts = verify_work(cfg, tokens=3, requests=1, context_len=4096, logit_rows=2)
    assert parts["experts"].flops == 3 * 5 * 6 * 3 * 2 * 4096 * 2048
    assert parts["logits"].flops == 2 * 2 * 4096 * 129280
    # 128 rows of the window, 512 chosen of 1024 entries twice, 32 heavy ones once.
    rows = 5 * 128 + 2 * 512 + 32
    assert parts["attention"].flops == 3 * (4 * 64 * 512 * rows + 2 * 2 * 64 * 128 * 1024)
    assert expected_experts(cfg, 1) == pytest.approx(6)
    assert expected_experts(cfg, 2) == pytest.approx(6 + 6 * 250 / 256)


def test_a_part_takes_the_larger_of_its_two_times():
    assert Work(4e9, 1e12).ms(4000, 500) == pytest.approx(2.0)
    assert Work(4e9, 1e11).ms(4000, 500) == pytest.approx(1.0)
    work = draft_work(load_config(FLASH, overrides_for(FLASH, layers=3, draft_len=7)), requests=1)
    assert work["transition"].num_bytes > 7 * 129280 * 256 * 2


def test_measured_times_stand_beside_the_floor():
    assert measured_curves([], None, 2000) == ({}, {}, None)
    curves = [
        {"context_len": 250, "verify": [[1, 5.0]], "draft": [[1, 1.0]]},
        {"context_len": 2000, "verify": [[1, 7.0], [64, 40.0]], "draft": [[1, 2.0], [8, 3.0]]},
    ]
    starts = [
        {"scenario": "a", "curves": curves},
        {"scenario": "b", "curves": None},
    ]
    assert measured_curves(starts, "b", 1900) == ({}, {}, None)
    assert measured_curves(starts, None, 1900) == ({1: 7.0, 64: 40.0}, {1: 2.0, 8: 3.0}, 2000)
    options = Options(layers=30, buckets=(1, 64), gb_s=4000, tflop_s=700)
    text = tables(options, starts)
    (row,) = [line for line in text.splitlines() if line.startswith("|     64 |")]
    ratio = float(row.split("|")[-2])
    assert ratio == pytest.approx(40 / float(row.split("|")[-4]), rel=0.02)
    assert "measured at 2000" in text


def test_layers_that_cannot_be():
    for layers in (2, 44):
        with pytest.raises(ConfigError, match="layers must lie in 3"):
            overrides_for(FLASH, layers=layers, draft_len=7)


def test_how_many_layers_fit(capsys):
    flags = ["--max-num-seqs", "256", "--max-model-len", "2048", "--memory-gib", "139"]
    assert flash_memory(flags) == 0
    row = capsys.readouterr().out.splitlines()[2]
    layers = int(row.split("|")[3])
    assert 25 <= layers < 43
    assert flash_memory([*flags, "--layers", str(layers)]) == 0
    capsys.readouterr()
    assert flash_memory([*flags, "--layers", str(layers + 1)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("error: memory in GiB: weights ")
    assert "--hf-overrides" in refusal
