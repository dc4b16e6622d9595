"""Loading: values end up where they belong, and whatever is wrong with a folder is said at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.names import plain_mtp_names
from dspark_jax.checkpoint.safetensors import CheckpointError, TensorFolder, write_file
from dspark_jax.kernels.quantized import Fp4Weight, Fp8Weight, dequantize
from tests.checkpoint.tiny import assert_same, random_trees, tiny_config

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised checkpoint with drafter."""
    folder = tmp_path_factory.mktemp("checkpoint") / "released"
    export_checkpoint(folder, tiny_config(), *random_trees(tiny_config()))
    return folder


@pytest.fixture
def edited(released: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint whose tensors and config.json went through functions."""

    def edit(
        tensors: Callable[[Tensors], object] = lambda _: None,
        config: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> Path:
        source = TensorFolder(released)
        copy = {name: source[name].copy() for name in source.infos}
        raw = json.loads((released / "config.json").read_text())
        tensors(copy)
        config(raw)
        write_file(tmp_path / "model.safetensors", copy)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return edit


@jax.jit
def dequantized(tree: Any) -> Any:
    is_weight = lambda leaf: isinstance(leaf, Fp8Weight | Fp4Weight)
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_weight(leaf) else leaf, tree, is_leaf=is_weight
    )


def test_kept_weights_expand_to_what_is_loaded_expanded(released: Path) -> None:
    cfg, params, draft_params = load_checkpoint(released)
    kept_cfg, kept, kept_draft = load_checkpoint(released, keep_quantized=True)
    assert cfg == kept_cfg == tiny_config()
    assert isinstance(kept.blocks.w_o_a, Fp8Weight)
    assert isinstance(kept.blocks.w_shared_gate_up, Fp8Weight)
    assert isinstance(kept.blocks.w_down, Fp4Weight)
    assert isinstance(kept.indexer.w_q_b, Fp8Weight)
    assert isinstance(kept_draft.w_main, Fp8Weight)
    assert isinstance(kept_draft.stages.w_gate_up, Fp4Weight)
    assert_same(dequantized((kept, kept_draft)), (params, draft_params))


def test_leaves_are_made_of_their_tensors(released: Path) -> None:
    file = TensorFolder(released)
    _, params, draft_params = load_checkpoint(released, keep_quantized=True)
    w1, w3 = (file[f"layers.2.ffn.experts.1.{name}.weight"].view(np.uint8) for name in ("w1", "w3"))
    packed = np.asarray(params.blocks.w_gate_up.packed[2, 1])
    np.testing.assert_array_equal(packed.view(np.uint8), np.concatenate([w1, w3]))
    shared = [
        file[f"mtp.1.ffn.shared_experts.{name}.scale"].view(np.uint8) for name in ("w1", "w3")
    ]
    np.testing.assert_array_equal(
        draft_params.stages.w_shared_gate_up.scale[1], np.concatenate(shared)
    )
    # Layers 1 and 3 are CSA, layer 2 is HCA.
    np.testing.assert_array_equal(params.csa.ape[1], file["layers.3.attn.compressor.ape"])
    np.testing.assert_array_equal(params.hca.ape[0], file["layers.2.attn.compressor.ape"])
    indexer = file["layers.3.attn.indexer.compressor.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params.indexer.compressor.g_norm[1], indexer)
    np.testing.assert_array_equal(params.tid2eid[0], file["layers.0.ffn.gate.tid2eid"])
    assert params.tid2eid.dtype == jnp.int32
    np.testing.assert_array_equal(params.blocks.b_router[0], 0)
    np.testing.assert_array_equal(params.blocks.b_router[3], file["layers.3.ffn.gate.bias"])
    markov = file["mtp.1.markov_head.markov_w1.weight"].astype(np.float32)
    np.testing.assert_array_equal(draft_params.markov_w1, markov)


def test_dtype_is_that_of_what_released_files_keep_narrow(released: Path) -> None:
    _, params, draft_params = load_checkpoint(released, dtype=jnp.bfloat16)
    assert params.embed.dtype == params.blocks.w_q_a.dtype == jnp.bfloat16
    assert params.blocks.g_attn.dtype == draft_params.markov_w1.dtype == jnp.bfloat16
    assert params.blocks.attn_sink.dtype == params.csa.ape.dtype == jnp.float32
    assert params.blocks.hyper_ffn.w_fn.dtype == draft_params.calibration_scale.dtype == jnp.float32
    # fp8 and fp4 values times a power of two are bf16 numbers: nothing is lost.
    _, exact, _ = load_checkpoint(released)
    for name in ("w_kv", "w_gate_up"):
        np.testing.assert_array_equal(
            getattr(params.blocks, name).astype(jnp.float32), getattr(exact.blocks, name)
        )


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("layers.1.attn.wo_a", lambda p, d: p.blocks.w_o_a[1]),
        ("layers.1.ffn.shared_experts.w2", lambda p, d: p.blocks.w_shared_down[1]),
        ("layers.1.ffn.experts.2.w2", lambda p, d: p.blocks.w_down[1, 2]),
        ("mtp.0.main_proj", lambda p, d: d.w_main),
    ],
)
def test_scales_are_applied(edited, released: Path, name: str, leaf) -> None:
    def double(tensors: Tensors) -> None:
        tensors[f"{name}.scale"].view(np.uint8)[...] += 1

    _, *before = load_checkpoint(released)
    _, *after = load_checkpoint(edited(double))
    np.testing.assert_array_equal(leaf(*after), 2 * leaf(*before))


def test_experts_may_be_fp8(edited) -> None:
    """The `-Base` releases keep experts in fp8; the dtype of the file decides."""
    cfg = tiny_config(expert_dtype="fp8")

    def as_fp8(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
            shape = (tensors[name].shape[0], 2 * tensors[name].shape[1])
            blocks = tuple(-(-n // 128) for n in shape)
            tensors[name] = np.full(shape, 1.5, ml_dtypes.float8_e4m3fn)
            scale = np.full(blocks, 128, np.uint8).view(ml_dtypes.float8_e8m0fnu)
            tensors[name.replace("weight", "scale")] = scale

    folder = edited(as_fp8, lambda raw: raw.update(expert_dtype="fp8"))
    loaded, params, _ = load_checkpoint(folder, keep_quantized=True)
    assert loaded == cfg
    assert isinstance(params.blocks.w_gate_up, Fp8Weight)
    assert (dequantize(params.blocks.w_gate_up) == 3).all()
    _, params, _ = load_checkpoint(folder)
    assert (params.blocks.w_down == 3).all()


def test_everything_wrong_is_said_at_once(edited) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["layers.0.ffn.shared_experts.w1.scale"]
        del tensors["mtp.1.confidence_head.proj.weight"]
        del tensors["mtp.1.markov_head.markov_w2.weight"]
        tensors["layers.0.attn.wq_a.bias"] = np.zeros(3, np.float32)
        tensors["norm.weight"] = np.zeros(7, np.float32)
        tensors["layers.1.attn.wkv.scale"] = tensors["layers.1.attn.wkv.scale"][:, :1]
        tensors["embed.weight"] = tensors["embed.weight"].astype(ml_dtypes.float8_e4m3fn)
        tensors["layers.0.ffn.gate.tid2eid"] = np.zeros((96, 2), np.float32)
        tensors["layers.2.attn.wo_b.scale"] = np.zeros((2, 1), np.float32)

    folder = edited(damage)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    assert str(caught.value).splitlines() == [
        f"the tensors of {folder} do not fit its config.json:",
        "  3 of a wrong dtype: embed.weight (F8_E4M3 for bf16), "
        "layers.0.ffn.gate.tid2eid (F32 for i64), layers.2.attn.wo_b.scale (F32 for F8_E8M0)",
        "  2 of a wrong shape: layers.1.attn.wkv.scale ([1, 1] instead of [1, 2]), "
        "norm.weight ([7] instead of [160])",
        "  3 missing: layers.0.ffn.shared_experts.w1.scale, mtp.1.confidence_head.proj.weight, "
        "mtp.1.markov_head.markov_w2.weight",
        "  1 unexpected: layers.0.attn.wq_a.bias",
    ]


def test_long_lists_are_cut_with_a_count(edited) -> None:
    def damage(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("w2.scale")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"24 missing: layers\.0\.ffn.*, and 12 more$"):
        load_checkpoint(edited(damage))


def test_a_scale_beside_a_plain_matrix_is_unexpected(edited) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["layers.0.attn.wo_a.weight"] = tensors["layers.0.attn.wo_a.weight"].astype(
            np.float32
        )

    with pytest.raises(CheckpointError, match=r"1 unexpected: layers\.0\.attn\.wo_a\.scale"):
        load_checkpoint(edited(damage))


def test_fp4_is_only_for_experts(edited) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["layers.0.attn.wkv.weight"] = np.zeros((48, 80), np.int8)

    with pytest.raises(CheckpointError, match=r"1 of a wrong dtype: .*wkv\.weight \(I8 for fp8\)$"):
        load_checkpoint(edited(damage))


@pytest.mark.parametrize("value", [-1, 3])
def test_table_entries_must_be_experts(edited, value: int) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][5, 1] = value

    with pytest.raises(CheckpointError, match=f"tid2eid.*{value}.*n_routed_experts is 3"):
        load_checkpoint(edited(damage))


@pytest.mark.parametrize("keep_quantized", [False, True])
def test_nan_scales_are_named(edited, keep_quantized: bool) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["layers.3.attn.wq_b.scale"].view(np.uint8)[0, 0] = 255

    with pytest.raises(CheckpointError, match=r"layers\.3\.attn\.wq_b\.scale holds NaN"):
        load_checkpoint(edited(damage), keep_quantized=keep_quantized)


def test_a_stack_of_mixed_storage_can_only_be_expanded(edited) -> None:
    def mix(tensors: Tensors) -> None:
        tensors["layers.2.attn.wkv.weight"] = np.ones((48, 160), np.float32)
        del tensors["layers.2.attn.wkv.scale"]

    folder = edited(mix)
    with pytest.raises(
        CheckpointError, match=r"rest of their stack .*: layers\.2\.attn\.wkv\.weight"
    ):
        load_checkpoint(folder, keep_quantized=True)
    _, params, _ = load_checkpoint(folder)
    assert (params.blocks.w_kv[2] == 1).all()


def test_fp8_parts_that_share_a_block_can_only_be_expanded(tmp_path: Path) -> None:
    cfg = tiny_config(moe_intermediate_size=32)
    export_checkpoint(tmp_path, cfg, *random_trees(cfg))
    with pytest.raises(CheckpointError, match="12 to be joined inside a 128-row block"):
        load_checkpoint(tmp_path, keep_quantized=True)
    loaded, params, _ = load_checkpoint(tmp_path)
    assert loaded == cfg
    assert params.blocks.w_shared_gate_up.shape == (4, 64, 160)


def test_calibration_is_optional_but_whole(edited) -> None:
    names = [f"mtp.1.confidence_head.calibration_{part}" for part in ("scale", "offset")]

    def remove(*gone: str) -> Callable[[Tensors], object]:
        return lambda tensors: [tensors.pop(name) for name in gone]

    _, _, draft_params = load_checkpoint(edited(remove(*names)))
    np.testing.assert_array_equal(draft_params.calibration_scale, np.ones(3))
    np.testing.assert_array_equal(draft_params.calibration_offset, np.zeros(3))
    with pytest.raises(CheckpointError, match=f"1 missing: {names[1]}"):
        load_checkpoint(edited(remove(names[1])))


def test_the_drafter_can_be_left_out(released: Path, edited) -> None:
    cfg, params, draft_params = load_checkpoint(released, draft=False)
    assert cfg == dataclasses.replace(tiny_config(), draft=None)
    assert draft_params is None
    assert_same(params, load_checkpoint(released)[1])
    headless = edited(lambda tensors: tensors.pop("mtp.1.markov_head.markov_w1.weight"))
    assert load_checkpoint(headless, draft=False)[2] is None


def test_stages_are_counted_and_checked(edited) -> None:
    folder = edited(config=lambda raw: raw.pop("dspark_num_stages"))
    assert load_checkpoint(folder)[0].draft.num_stages == 2
    folder = edited(config=lambda raw: raw.update(dspark_num_stages=3))
    with pytest.raises(CheckpointError, match="dspark_num_stages 3, the tensors have 2 stages"):
        load_checkpoint(folder)


def test_a_missing_drafter_is_not_overlooked(edited) -> None:
    def remove(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"no mtp\.\* tensor is there; load with draft=False"):
        load_checkpoint(edited(remove))


def without_dspark(raw: dict[str, Any]) -> None:
    for key in [key for key in raw if key.startswith("dspark_")]:
        del raw[key]


def test_a_plain_prediction_block_is_passed_over(edited) -> None:
    def replace(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]
        tensors |= {name: np.zeros(1, np.uint8) for name in plain_mtp_names(tiny_config())}

    cfg, _, draft_params = load_checkpoint(edited(replace, without_dspark))
    assert cfg.draft is None
    assert draft_params is None


def test_a_drafter_that_config_does_not_mention_is_unexpected(edited) -> None:
    with pytest.raises(CheckpointError, match=r"\d unexpected: .*mtp\.1\.markov_head\.markov_w1"):
        load_checkpoint(edited(config=without_dspark))


def test_arrays_go_where_their_axes_say(released: Path) -> None:
    asked: list[tuple[tuple[str | None, ...], tuple[int, ...]]] = []

    def sharding_of(axes, shape):
        asked.append((axes, shape))
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    _, params, draft_params = load_checkpoint(
        released, keep_quantized=True, sharding_of=sharding_of
    )
    leaves = jax.tree.leaves((params, draft_params))
    assert [shape for _, shape in asked] == [leaf.shape for leaf in leaves]
    assert (("layers", "experts", "model", "ffn"), (4, 3, 2, 256)) in asked  # scales of w_gate_up
    assert all(len(axes) == len(shape) for axes, shape in asked)


def test_arrays_are_adopted_and_not_copied(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the stacks that were filled are the arrays: a copy would double the memory."""
    filled: set[int] = set()

    def record(array: np.ndarray) -> jax.Array:
        filled.add(array.ctypes.data)
        return device_put(array)

    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", record)
    _, params, _ = load_checkpoint(released, keep_quantized=True)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)} <= filled
