"""The simulator: published shapes of the curves, and its command line."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.budget import (
    BudgetLimits,
    BudgetPolicy,
    CostCurves,
    CostTable,
    save_profile,
)
from dspark_jax.budget.published import EXTENSION_NOTE, published_curves
from dspark_jax.budget.replay import Arm, Load, replay
from dspark_jax.budget.simulate import SimulateFlags, format_table, main, notes, parse_arm, simulate
from dspark_jax.budget.traces import FLASH_SURVIVAL, RecordedTrace, SyntheticTrace


def throughput(table, concurrency, num_steps=80):
    flags = SimulateFlags(
        table=table,
        arms=("none", "fixed-7", "adaptive"),
        concurrency=(concurrency,),
        num_steps=num_steps,
        min_proposals=1000,
        seed=3,
    )
    return {r.arm: r.tokens_per_s for r in simulate(flags)}


def test_published_anchors():
    curves = published_curves(1024)
    cost = CostTable([curves], max_tokens=16384, max_requests=256, capture_limit=1024)

    def verify_ms(num_tokens):
        return cost.step_ms(num_tokens, 1, draft=False, context_len=8192)

    anchors = {1: 5.1, 8: 5.35, 128: 9.5, 1024: 20.6, 1025: 104.5, 2048: 104.5, 16384: 235.0}
    assert {tokens: verify_ms(tokens) for tokens in anchors} == pytest.approx(anchors)
    assert verify_ms(9) == verify_ms(16)
    assert len(curves.verify) == 88


def test_extension_continues_the_slope():
    verify = published_curves(4096).verify
    assert verify[2048] - verify[1024] == pytest.approx((20.6 - 11.5) / 768 * 1024)
    assert {t: ms for t, ms in verify.items() if t <= 1024} == {
        t: ms for t, ms in published_curves(1024).verify.items() if t <= 1024
    }
    assert EXTENSION_NOTE in notes(SimulateFlags(table="published-4096"))
    assert EXTENSION_NOTE not in notes(SimulateFlags(table="published-1024"))


@pytest.mark.parametrize("limit", [512, 1025, 32768])
def test_published_limits(limit):
    with pytest.raises(ValueError, match="capture_limit"):
        published_curves(limit)


def test_capture_limit_1024_makes_fixed_drafts_lose_at_256_requests():
    # Prompts that arrive together push a step over the limit; a fair share of them takes a while.
    rates = throughput("published-1024", 256, num_steps=300)
    assert rates["fixed-7"] < 0.67 * rates["none"]
    assert rates["adaptive"] > 1.05 * rates["none"]


def test_capture_limit_4096_makes_fixed_drafts_win_at_256_requests():
    rates = throughput("published-4096", 256)
    assert rates["fixed-7"] > 1.05 * rates["none"]
    assert rates["adaptive"] > 1.05 * rates["fixed-7"]


def test_few_requests_verify_almost_everything():
    rates = throughput("published-4096", 2)
    assert rates["adaptive"] > 0.97 * rates["fixed-7"]
    assert rates["fixed-7"] > 2.0 * rates["none"]


def flat_cost(verify_ms=1.0, draft_ms=0.5):
    curves = CostCurves(context_len=0, verify={4096: verify_ms}, draft={1: draft_ms})
    return CostTable([curves], max_tokens=4096, max_requests=64)


def always(confidence, accept_len, draft_len=3):
    return RecordedTrace(
        4,
        np.array([0]),
        np.full((1, draft_len), confidence, dtype=np.float32),
        np.array([accept_len]),
        np.random.default_rng(0),
    )


def play(arm, trace, cost, **load):
    load = {"concurrency": 4, "prompt_len": 8, "output_len": 40, "num_steps": 100} | load
    rng = np.random.default_rng(0)
    return replay(arm, Load(**load), trace, cost, 0.0, BudgetLimits(max_logit_rows=10_000), rng)


def test_plain_decoding_emits_one_token_per_request_and_step():
    result = play(parse_arm("none"), always(1.0, 3), flat_cost())
    assert result.accepted_len == 1.0
    assert result.tokens_per_s == pytest.approx(4 / 1e-3)
    assert result.token_ms == pytest.approx(1.0)
    assert result.budget == 0.0


def test_accepted_drafts_are_emitted_and_the_drafter_is_paid_for():
    # 40 tokens: one in the step of the prompt, nine steps of four, and the last three, whose draft
    # is cut to two: 11 steps.
    result = play(parse_arm("fixed-3"), always(1.0, 3), flat_cost(), num_steps=1100)
    assert result.step_ms == pytest.approx(1.5)
    assert result.accepted_len == pytest.approx(39 / 10)
    assert result.tokens_per_s == pytest.approx(4 * 40 / 11 / 1.5e-3)


def test_adaptive_trims_what_is_not_worth_its_cost():
    curves = CostCurves(context_len=0, verify={4: 1.0, 8: 2.0, 64: 10.0}, draft={1: 0.0})
    cost = CostTable([curves], max_tokens=64, max_requests=64)
    result = play(parse_arm("adaptive"), always(0.9, 3), cost)
    fixed = play(parse_arm("fixed-3"), always(0.9, 3), cost)
    assert result.tokens_per_s > fixed.tokens_per_s
    assert 0.0 < result.budget <= 8.0


def test_drafts_that_are_only_offered_keep_no_prompt_waiting():
    # Half of all tokens are prompts, and all drafts of all requests would fill every step.
    verify = {
        16: 20.0,
        64: 37.0,
        128: 46.0,
        256: 54.0,
        512: 65.0,
        1024: 96.0,
        1536: 123.0,
        2048: 139.0,
    }
    curves = CostCurves(context_len=0, verify=verify, draft={1: 2.4, 64: 9.8, 256: 22.3})
    cost = CostTable([curves], max_tokens=2048, max_requests=256)
    rates = {}
    for name in ("none", "fixed-5", "adaptive"):
        trace = SyntheticTrace(256, FLASH_SURVIVAL, np.random.default_rng(3))
        load = {"concurrency": 256, "prompt_len": 512, "output_len": 128, "num_steps": 200}
        rates[name] = play(parse_arm(name), trace, cost, **load).tokens_per_s
    assert rates["adaptive"] > 1.1 * max(rates["none"], rates["fixed-5"])


def test_hopeless_drafter_is_skipped():
    result = play(parse_arm("adaptive"), always(0.0, 0), flat_cost(), num_steps=1000)
    assert result.skipped > 0.9
    plain = play(parse_arm("none"), always(0.0, 0), flat_cost(), num_steps=1000)
    assert result.tokens_per_s > 0.95 * plain.tokens_per_s


def test_prompts_that_would_overfill_a_step_wait():
    curves = CostCurves(context_len=0, verify={32: 1.0}, draft={1: 0.0})
    cost = CostTable([curves], max_tokens=32, max_requests=64)
    result = play(parse_arm("none"), always(1.0, 3), cost, prompt_len=20, output_len=1)
    # Every request is one prompt of 20 tokens, so a step holds one of the four.
    assert result.step_tokens == pytest.approx(20.0)
    assert result.tokens_per_s == pytest.approx(1 / 1e-3)


@pytest.mark.parametrize("name", ["fixed", "fixed-0", "fixed-x", "adaptiv"])
def test_unknown_arms_are_refused(name):
    with pytest.raises(ValueError, match="arm must be"):
        parse_arm(name)


def test_fixed_arm_longer_than_the_draft_is_refused():
    with pytest.raises(ValueError, match="fixed-8"):
        simulate(SimulateFlags(arms=("fixed-8",), concurrency=(1,), num_steps=1))


def test_same_seed_same_numbers():
    flags = SimulateFlags(concurrency=(16,), num_steps=20, min_proposals=0)
    assert simulate(flags) == simulate(flags)
    assert simulate(flags) != simulate(dataclasses.replace(flags, seed=1))


def test_main_writes_json_and_a_picture_from_a_stored_profile_and_a_record(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    profile, record = tmp_path / "profile.json", tmp_path / "record.jsonl"
    curves = CostCurves(context_len=512, verify={8: 1.0, 64: 2.0}, draft={1: 0.1})
    save_profile(profile, [curves], {"device_kind": "cpu"})
    record.write_text('{"request_id": 0, "confidences": [0.9, 0.5], "accept_len": 1}\n')
    flags = SimulateFlags(
        profile=profile,
        confidences=record,
        arms=("none", "fixed-2", "adaptive"),
        concurrency=(1, 4),
        prompt_len=4,
        num_steps=30,
        min_proposals=0,
        output=tmp_path / "result.json",
        plot=tmp_path / "result.png",
    )
    main(flags)
    printed = capsys.readouterr().out
    document = json.loads(flags.output.read_text())
    assert [(r["concurrency"], r["arm"]) for r in document["results"]] == [
        (1, "none"),
        (1, "fixed-2"),
        (1, "adaptive"),
        (4, "none"),
        (4, "fixed-2"),
        (4, "adaptive"),
    ]
    assert document["flags"]["profile"] == str(profile)
    for result in document["results"]:
        assert f"{result['tokens_per_s']:.0f}" in printed
    assert flags.plot.read_bytes().startswith(b"\x89PNG")
    assert "synthetic" not in printed


def test_table_without_plain_arm_has_no_gain():
    results = simulate(SimulateFlags(arms=("adaptive",), concurrency=(64,), num_steps=5))
    assert " - " in format_table(results).splitlines()[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SimulateFlags(arms=("speculative",)), "arm must be"),
        (SimulateFlags(profile=Path("absent.json")), "absent.json"),
        (SimulateFlags(survival=(0.5, 0.6)), "survival"),
        (SimulateFlags(concurrency=(0,)), "at least 1"),
    ],
)
def test_errors_are_one_line(flags, message):
    flags = dataclasses.replace(flags, concurrency=flags.concurrency[:1])
    with pytest.raises(SystemExit, match=message) as info:
        main(flags)
    assert "\n" not in str(info.value)


def test_plot_without_matplotlib_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs matplotlib"):
        main(SimulateFlags(plot=tmp_path / "result.png"))


def test_command_line_helps_without_loading_jax_or_matplotlib():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['simulate', '--help']\n"
        "try:\n"
        "    runpy.run_module('dspark_jax.budget.simulate', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "loaded = {'jax', 'flax', 'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "--concurrency" in result.stdout


def test_arm_names_become_policies():
    assert parse_arm("none") == Arm(name="none", policy=BudgetPolicy(mode="none"))
    assert parse_arm("fixed-3") == Arm(
        name="fixed-3", policy=BudgetPolicy(mode="fixed"), draft_len=3
    )
    assert parse_arm("adaptive").policy == BudgetPolicy(prompt_cost="sunk")
    assert parse_arm("adaptive", "shared").policy == BudgetPolicy()
