"""Orbax stores: bits survive, quantised or not, and shards are read where they belong."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.checkpoint.store import is_store, restore_store, save_store
from tests.checkpoint.tiny import assert_same, random_trees, tiny_config

SHARDED_RESTORE = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dspark_jax.checkpoint.store import restore_store

assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("expert", "tensor"))
mesh_axis = {"layers": "expert", "model": "tensor"}

def sharding_of(axes, shape):
    # Scales of a quantised matrix may be too short to be cut.
    parts = [mesh_axis.get(axis) for axis in axes]
    fits = [p if p and n % mesh.shape[p] == 0 else None for p, n in zip(parts, shape)]
    return NamedSharding(mesh, PartitionSpec(*fits))

_, params, draft_params = restore_store(sys.argv[1], sharding_of=sharding_of)
_, whole, whole_draft = restore_store(sys.argv[1])
for a, b in zip(
    jax.tree.leaves((params, draft_params)), jax.tree.leaves((whole, whole_draft)), strict=True
):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
weight = params.blocks.w_q_a.weight
assert weight.shape == (4, 32, 160)
assert {s.data.shape for s in weight.addressable_shards} == {(1, 32, 80)}
assert len({s.device for s in weight.addressable_shards}) == 8
assert len({str(s.index) for s in weight.addressable_shards}) == 8
assert params.blocks.w_q_a.scale.addressable_shards[0].data.shape == (1, 1, 1)
assert params.embed.addressable_shards[0].data.shape == (96, 80)
assert whole.embed.devices() == {jax.devices()[0]}
with jax.default_device(jax.devices()[3]):
    _, placed, _ = restore_store(sys.argv[1], draft=False)
assert placed.embed.devices() == {jax.devices()[3]}
print("sharded")
"""


def test_plain_trees_survive_bit_for_bit(tmp_path: Path) -> None:
    cfg = tiny_config()
    trees = random_trees(cfg)
    save_store(tmp_path / "store", cfg, *trees)
    restored, *back = restore_store(tmp_path / "store")
    assert restored == cfg
    assert_same(tuple(back), trees)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of kept fp8 and fp4 weights, the rest in bf16."""
    folder = tmp_path_factory.mktemp("store")
    export_checkpoint(folder / "released", tiny_config(), *random_trees(tiny_config()))
    loaded = load_checkpoint(folder / "released", dtype="bfloat16", keep_quantized=True)
    save_store(folder / "store", *loaded)
    return folder


def test_quantised_trees_survive_bit_for_bit(quantised: Path) -> None:
    loaded = load_checkpoint(quantised / "released", dtype="bfloat16", keep_quantized=True)
    restored = restore_store(quantised / "store")
    assert restored[0] == loaded[0]
    assert_same(restored[1:], loaded[1:])


def test_shards_are_restored_to_their_devices(quantised: Path) -> None:
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", SHARDED_RESTORE, str(quantised / "store")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "sharded"


def test_the_drafter_can_be_left_out_either_way(quantised: Path, tmp_path: Path) -> None:
    cfg, params, draft_params = restore_store(quantised / "store", draft=False)
    assert cfg == dataclasses.replace(tiny_config(), draft=None)
    assert draft_params is None
    save_store(tmp_path / "alone", tiny_config(), params, None)
    restored, again, draft_params = restore_store(tmp_path / "alone")
    assert restored == cfg
    assert draft_params is None
    assert_same(again, params)


def test_stores_are_told_from_other_folders(quantised: Path, tmp_path: Path) -> None:
    assert is_store(quantised / "store")
    assert not is_store(quantised / "released")
    with pytest.raises(CheckpointError, match="is no parameter store"):
        restore_store(quantised / "released")
    with pytest.raises(CheckpointError, match="already holds a store"):
        save_store(quantised / "store", tiny_config(), *random_trees(tiny_config()))
    with pytest.raises(CheckpointError, match=r"cfg\.draft is None"):
        save_store(
            tmp_path, dataclasses.replace(tiny_config(), draft=None), *random_trees(tiny_config())
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 97}, r"embed was saved as \[96, 160\], config.json asks for \[97, 160\]"),
        ({"head_dim": 32}, r"blocks.w_q_b.weight was saved as \[4, 192, 32\]"),
        ({"compress_ratios": [4, 4, 8, 4]}, r"csa.w_kv_gate was saved as \[2, 192, 160\]"),
    ],
)
def test_a_config_that_does_not_fit_is_named(
    quantised: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    (tmp_path / "target").symlink_to(quantised / "store" / "target")
    raw = json.loads((quantised / "store" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=message):
        restore_store(tmp_path, draft=False)


def test_a_missing_branch_is_named(tmp_path: Path) -> None:
    cfg = tiny_config(compress_ratios=[0, 4, 0, 4])
    params, _ = random_trees(cfg)
    save_store(tmp_path / "store", cfg, params, None)
    raw = json.loads((tmp_path / "store" / "config.json").read_text())
    raw["compress_ratios"] = [0, 4, 8, 4]
    (tmp_path / "store" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"target lacks hca\.w_kv"):
        restore_store(tmp_path / "store")
