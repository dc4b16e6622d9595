"""Exporting: what comes back is exactly the tree rounded to the released formats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint.config_json import config_to_dict
from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.formats import decode_fp4, decode_fp8, encode_fp4, encode_fp8
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.names import flatten_specs
from dspark_jax.checkpoint.safetensors import CheckpointError, TensorFolder
from dspark_jax.config import ModelConfig, config_from_dict
from dspark_jax.draft.params import draft_specs
from dspark_jax.model.params import param_specs
from tests.checkpoint.tiny import RAW, assert_same, random_trees, tiny_config
from tests.seeds import fresh_seed
from torch_ref.checkpoint import load_tensors


def rounded(tree: Any, specs: Any, expert_dtype: str, joined: tuple[str, ...]) -> Any:
    """The tree with every matrix rounded as its storage says, halves of joined matrices apart."""
    matrix = {
        "fp8": lambda m: decode_fp8(*encode_fp8(m)),
        "fp4": lambda m: decode_fp4(*encode_fp4(m)),
    }

    def leaf(path: tuple[str, ...], spec: Any, array: jax.Array) -> np.ndarray:
        array = np.asarray(array)
        if spec.storage in ("f32", "i64"):
            return array
        if spec.storage == "bf16":
            return array.astype(ml_dtypes.bfloat16).astype(np.float32)
        kind = expert_dtype if spec.storage == "expert" else spec.storage
        parts = 2 if path[-1] in joined else 1
        matrices = array.reshape(-1, array.shape[-2] // parts, array.shape[-1])
        return np.stack([matrix[kind](m) for m in matrices]).reshape(array.shape)

    leaves = jax.tree.leaves(tree)
    flat = [leaf(*item, array) for item, array in zip(flatten_specs(specs), leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), flat)


def both_rounded(cfg: ModelConfig, params: Any, draft_params: Any) -> tuple[Any, Any]:
    joined = ("w_gate_up", "w_shared_gate_up")
    return (
        rounded(params, param_specs(cfg), cfg.expert_dtype, joined),
        rounded(draft_params, draft_specs(cfg), cfg.expert_dtype, joined),
    )


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("width", [128, 32])
@pytest.mark.parametrize("max_shard_bytes", [None, 100_000])
def test_export_then_load_is_rounding(
    tmp_path: Path, expert_dtype: str, width: int, max_shard_bytes: int | None
) -> None:
    cfg = tiny_config(expert_dtype=expert_dtype, moe_intermediate_size=width)
    trees = random_trees(cfg, fresh_seed())
    export_checkpoint(tmp_path, cfg, *trees, max_shard_bytes=max_shard_bytes)
    loaded, *back = load_checkpoint(tmp_path)
    assert loaded == cfg
    assert_same(tuple(back), both_rounded(cfg, *trees))


def test_rounding_twice_is_rounding_once(tmp_path: Path) -> None:
    cfg = tiny_config()
    export_checkpoint(tmp_path / "once", cfg, *random_trees(cfg))
    _, *once = load_checkpoint(tmp_path / "once")
    export_checkpoint(tmp_path / "twice", cfg, *once)
    _, *twice = load_checkpoint(tmp_path / "twice")
    assert_same(twice, once)


def test_without_quantising_nothing_is_lost(tmp_path: Path) -> None:
    cfg = tiny_config()
    trees = random_trees(cfg)
    export_checkpoint(tmp_path, cfg, *trees, quantize=False)
    assert {info.dtype for info in TensorFolder(tmp_path).infos.values()} == {"F32", "I64"}
    loaded, *back = load_checkpoint(tmp_path)
    assert loaded == cfg
    assert_same(tuple(back), trees)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_quantised_leaves_are_written_byte_for_byte(tmp_path: Path, expert_dtype: str) -> None:
    cfg = tiny_config(expert_dtype=expert_dtype)
    export_checkpoint(tmp_path / "a", cfg, *random_trees(cfg))
    _, *kept = load_checkpoint(tmp_path / "a", keep_quantized=True)
    export_checkpoint(tmp_path / "b", cfg, *kept)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    export_checkpoint(tmp_path / "plain", cfg, *kept, quantize=False)
    assert_same(load_checkpoint(tmp_path / "plain")[1:], load_checkpoint(tmp_path / "a")[1:])


def test_files_are_in_the_released_formats(tmp_path: Path) -> None:
    cfg = tiny_config()
    export_checkpoint(tmp_path, cfg, *random_trees(cfg))
    infos = TensorFolder(tmp_path).infos
    expected = {
        "layers.0.attn.wo_a.weight": ("F8_E4M3", (32, 96)),
        "layers.0.attn.wo_a.scale": ("F8_E8M0", (1, 1)),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", (1, 2)),
        "layers.0.ffn.experts.2.w3.weight": ("I8", (128, 80)),
        "layers.0.ffn.experts.2.w3.scale": ("F8_E8M0", (128, 5)),
        "layers.0.ffn.gate.tid2eid": ("I64", (96, 2)),
        "layers.1.ffn.gate.bias": ("F32", (3,)),
        "layers.1.attn.indexer.weights_proj.weight": ("BF16", (9, 160)),
        "mtp.1.confidence_head.proj.weight": ("BF16", (1, 168)),
        "mtp.1.hc_head_scale": ("F32", (1,)),
    }
    assert {n: (infos[n].dtype, infos[n].shape) for n in expected} == expected
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["quantization_config"]["weight_block_size"] == [128, 128]
    assert raw["compress_ratios"] == RAW["compress_ratios"]
    assert "csa_compress_ratio" not in raw


def test_the_reference_reads_the_same_values(tmp_path: Path) -> None:
    cfg = tiny_config()
    export_checkpoint(tmp_path, cfg, *random_trees(cfg))
    weights = load_tensors(tmp_path)
    _, params, draft_params = load_checkpoint(tmp_path)
    w1, w3 = (weights[f"layers.3.ffn.experts.2.{name}.weight"].numpy() for name in ("w1", "w3"))
    np.testing.assert_array_equal(params.blocks.w_gate_up[3, 2], np.concatenate([w1, w3]))
    np.testing.assert_array_equal(draft_params.w_main, weights["mtp.0.main_proj.weight"].numpy())
    np.testing.assert_array_equal(
        params.blocks.w_o_b[1], weights["layers.1.attn.wo_b.weight"].numpy()
    )


def test_identity_calibration_is_not_written(tmp_path: Path) -> None:
    cfg = tiny_config()
    params, draft_params = random_trees(cfg)
    plain = dataclasses.replace(
        draft_params, calibration_scale=jnp.ones(3), calibration_offset=jnp.zeros(3)
    )
    export_checkpoint(tmp_path, cfg, params, plain)
    assert not [name for name in TensorFolder(tmp_path).infos if "calibration" in name]
    _, _, back = load_checkpoint(tmp_path)
    assert_same(back.calibration_scale, plain.calibration_scale)


def test_the_target_can_be_written_alone(tmp_path: Path) -> None:
    cfg = tiny_config()
    params, _ = random_trees(cfg)
    export_checkpoint(tmp_path, cfg, params, None, quantize=False)
    loaded, back, draft_params = load_checkpoint(tmp_path)
    assert loaded == dataclasses.replace(cfg, draft=None)
    assert draft_params is None
    assert_same(back, params)


def test_trees_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cfg = tiny_config()
    params, draft_params = random_trees(cfg)
    small = dataclasses.replace(params, g_norm=jnp.zeros(3))
    with pytest.raises(CheckpointError, match=r"g_norm \[3\] instead of \[160\]"):
        export_checkpoint(tmp_path, cfg, small, draft_params)
    with pytest.raises(CheckpointError, match=r"cfg\.draft is None"):
        export_checkpoint(tmp_path, dataclasses.replace(cfg, draft=None), params, draft_params)
    with pytest.raises(CheckpointError, match="expert_dtype 'int4'"):
        export_checkpoint(tmp_path, tiny_config(expert_dtype="int4"), params, draft_params)
    broken = dataclasses.replace(draft_params, w_main=draft_params.w_main.at[0, 0].set(jnp.nan))
    with pytest.raises(CheckpointError, match=r"mtp\.0\.main_proj\.weight: .*NaN"):
        export_checkpoint(tmp_path, cfg, params, broken)
    assert not list(tmp_path.iterdir())


def test_kept_experts_must_have_the_declared_format(tmp_path: Path) -> None:
    export_checkpoint(tmp_path / "a", tiny_config(), *random_trees(tiny_config()))
    _, *kept = load_checkpoint(tmp_path / "a", keep_quantized=True)
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.w1.*: a matrix kept in fp4 cannot be written as fp8"
    ):
        export_checkpoint(tmp_path / "b", tiny_config(expert_dtype="fp8"), *kept)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"csa_compress_ratio": 2, "compress_ratios": [0, 2, 4, 2]},
        {"rope_scaling": None},
        {"swiglu_limit": 0.5, "hc_eps": 1e-5, "expert_dtype": "fp8", "eos_token_id": 7},
        {"num_hash_layers": 0, "dspark_num_stages": 1},
    ],
)
def test_config_survives_its_file(changes: dict[str, Any]) -> None:
    cfg = tiny_config(**changes)
    raw = config_to_dict(cfg, quantized=True)
    assert config_from_dict(json.loads(json.dumps(raw))) == cfg


def test_equal_ratios_cannot_be_written() -> None:
    cfg = dataclasses.replace(tiny_config(), hca_ratio=4)
    with pytest.raises(CheckpointError, match="csa_ratio and hca_ratio are both 4"):
        config_to_dict(cfg, quantized=True)
