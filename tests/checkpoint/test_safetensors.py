"""The reader against the official library, and against files damaged in every way it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark_jax.checkpoint.safetensors import (
    DTYPES,
    INDEX_NAME,
    CheckpointError,
    TensorFolder,
    read_header,
    write_file,
    write_folder,
)


def every_dtype() -> dict[str, np.ndarray]:
    values = np.array([[0, 1, 2], [4, 8, 16]])
    return {
        f"x.{name}": (values + (name == "F8_E8M0")).astype(np.float32).astype(dtype)
        for name, dtype in DTYPES.items()
    } | {"scalar": np.array(3, np.int64), "empty": np.zeros((0, 4), np.float32)}


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(
    begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None
) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_survives_bit_for_bit(tmp_path: Path) -> None:
    tensors = every_dtype()
    write_folder(tmp_path, tensors.items(), None)
    folder = TensorFolder(tmp_path)
    assert folder.infos.keys() == tensors.keys()
    for name, expected in tensors.items():
        actual = folder[name]
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
        assert not actual.flags.writeable


def test_the_official_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = every_dtype()
    write_file(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == tensors.keys()
        for name, expected in tensors.items():
            actual = file.get_tensor(name)
            assert tuple(actual.shape) == expected.shape
            raw = actual.reshape(-1).view(torch.uint8) if actual.numel() else actual
            assert raw.numpy().tobytes() == expected.tobytes(), name


def test_we_read_what_the_official_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2, 4).to(torch.bfloat16),
        "c": torch.randn(7).to(torch.float8_e4m3fn),
        "d": torch.tensor([True, False]),
        "e": torch.arange(5) - 2,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    for name, expected in tensors.items():
        assert folder[name].tobytes() == expected.view(torch.uint8).numpy().tobytes()
        assert folder[name].shape == tuple(expected.shape)


def test_bytes_do_not_depend_on_order_and_tensors_are_aligned(tmp_path: Path) -> None:
    tensors = every_dtype()
    write_file(tmp_path / "a", tensors)
    write_file(tmp_path / "b", dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    for info in read_header(tmp_path / "a").values():
        assert info.start % DTYPES[info.dtype].itemsize == 0


def test_shards_stay_under_their_limit_and_come_back_through_the_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(10 * i + 1, i, np.float32) for i in range(9)}
    write_folder(tmp_path, tensors.items(), max_shard_bytes=500)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert list(index["weight_map"]) == sorted(tensors)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    sizes = [sum(i.num_bytes for i in read_header(tmp_path / f).values()) for f in files]
    assert max(sizes) <= 500
    folder = TensorFolder(tmp_path)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(folder[name], expected)


def test_a_folder_with_tensors_is_not_overwritten(tmp_path: Path) -> None:
    write_folder(tmp_path, [("x", np.zeros(1))], None)
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        write_folder(tmp_path, [("x", np.ones(1))], None)


def test_a_dtype_without_a_name_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x: dtype complex64"):
        write_file(tmp_path / "x", {"x": np.zeros(1, np.complex64)})


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "not valid JSON"),
        (b"\xff\xfe\x00", b"", "not valid JSON"),
        ([1], b"", "JSON list, not an object"),
        ({"x": entry(0, 4)}, b"abc", "truncated: tensors need 4 bytes, 3 are there"),
        ({"x": entry(0, 4)}, b"abcde", "1 bytes that no tensor owns"),
        ({"x": entry(0, 4), "y": entry(3, 6)}, b"abcdef", "'y' overlaps the tensor before it"),
        ({"x": entry(0, 4), "y": entry(5, 6)}, b"abcdef", "'y' follows a gap"),
        ({"x": entry(0, 4, "F4")}, b"abcd", "unknown dtype 'F4'"),
        ({"x": entry(0, 4, "F32", [2])}, b"abcd", "spans 4 bytes, but F32 .2. needs 8"),
        ({"x": entry(0, 4, "U8", [-4])}, b"abcd", "negative or fractional"),
        ({"x": entry(4, 0, "U8", [-4])}, b"abcd", "negative or fractional"),
        ({"x": {"dtype": "U8", "shape": [4]}}, b"abcd", "needs dtype, shape and two data_offsets"),
        ({"x": 3}, b"", "needs dtype, shape and two data_offsets"),
        (
            b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"a",
            "'x' occurs twice",
        ),
    ],
)
def test_damaged_headers_are_named(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        TensorFolder(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", (100).to_bytes(8, "little") + b"{}"])
def test_files_shorter_than_their_header_are_truncated(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated"):
        TensorFolder(tmp_path)


def test_an_absurd_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((200 << 20).to_bytes(8, "little"))
        file.truncate(300 << 20)  # sparse
    with pytest.raises(CheckpointError, match="exceeds"):
        TensorFolder(tmp_path)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "x": entry(0, 1)}
    assert list(read_header(write_raw(tmp_path / "x", header, b"a"))) == ["x"]


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "no index with a weight_map"),
        ('{"metadata": {}}', "no index with a weight_map"),
        ('{"weight_map": {"x": "../x.safetensors"}}', "not a file of this folder"),
        ('{"weight_map": {"x": "absent.safetensors"}}', "does not exist"),
        ('{"weight_map": {"x": "a", "z": "a"}}', "disagree about 1 tensors, first 'z'"),
        ('{"weight_map": {"x": "b", "y": "b"}}', "disagree about 1 tensors, first 'x'"),
        ('{"weight_map": {"x": "a", "y": "b", "w": "c"}}', "'x' is in .*a and in .*c"),
    ],
)
def test_indices_that_lie_are_refused(tmp_path: Path, index: str, message: str) -> None:
    one = np.ones(1, ml_dtypes.bfloat16)
    write_file(tmp_path / "a", {"x": one})
    write_file(tmp_path / "b", {"y": one})
    write_file(tmp_path / "c", {"x": one, "w": one})
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        TensorFolder(tmp_path)
