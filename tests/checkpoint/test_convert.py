"""The conversion command, from the flags to the files."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.checkpoint.convert import main
from dspark_jax.checkpoint.export import export_checkpoint
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.store import restore_store
from dspark_jax.kernels.quantized import Fp4Weight
from tests.checkpoint.tiny import assert_same, random_trees, tiny_config


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "released"
    export_checkpoint(folder, tiny_config(), *random_trees(tiny_config()))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*args: object) -> None:
    main([str(arg) for arg in args])


def test_there_and_back_gives_the_same_files(released: Path, tmp_path: Path) -> None:
    run(released, tmp_path / "store", "--to", "orbax")
    assert isinstance(restore_store(tmp_path / "store")[1].blocks.w_down, Fp4Weight)
    run(tmp_path / "store", tmp_path / "back", "--to", "safetensors")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (released / name).read_bytes()


def test_expanding_and_narrowing(released: Path, tmp_path: Path) -> None:
    run(released, tmp_path / "s", "--to", "orbax", "--no-keep-quantized", "--dtype", "bfloat16")
    cfg, params, draft_params = restore_store(tmp_path / "s")
    assert params.blocks.w_down.dtype == draft_params.w_main.dtype == jnp.bfloat16
    expected = load_checkpoint(released, dtype=jnp.bfloat16)
    assert cfg == expected[0]
    assert_same((params, draft_params), expected[1:])


def test_plain_float32_copy_in_shards_without_drafter(released: Path, tmp_path: Path) -> None:
    run(
        *(released, tmp_path / "plain", "--to", "safetensors"),
        *("--no-quantize", "--no-draft", "--max-shard-gb", 1e-3),
    )
    assert len(list((tmp_path / "plain").glob("model-*-of-*.safetensors"))) > 1
    cfg, params, draft_params = load_checkpoint(tmp_path / "plain")
    assert cfg.draft is None
    assert draft_params is None
    assert_same(params, load_checkpoint(released)[1])


def test_failures_are_one_line(released: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^convert: .* already holds model\.safetensors"):
        run(released, released, "--to", "safetensors")
    with pytest.raises(SystemExit, match=r"^convert: no config\.json in"):
        run(tmp_path, tmp_path / "x", "--to", "orbax")
