"""Reading and writing safetensors files: a memory map per file, every header checked before a byte is used.

The format is an eight-byte little-endian header length, a JSON header (name → dtype, shape, byte range) and
the tensors' bytes without gaps. Large checkpoints are several such files and an index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100 << 20
_METADATA_KEY = "__metadata__"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked; the message names file, tensor and reason."""


class TensorInfo(NamedTuple):
    """What a header says about one tensor. `start` counts bytes from the beginning of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TensorFolder:
    """All tensors of a checkpoint folder: `model.safetensors`, or the files that its index lists.

    Raises `CheckpointError` when there is neither, a file is damaged, or index and files disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if (folder / INDEX_NAME).exists():
            paths, listed = _read_index(folder)
        elif (folder / SINGLE_NAME).exists():
            paths, listed = [folder / SINGLE_NAME], None
        else:
            raise CheckpointError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        self.infos: dict[str, TensorInfo] = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in self.infos:
                    raise CheckpointError(f"{name!r} is in {self.infos[name].path} and in {path}")
                self.infos[name] = info
        if listed is not None:
            _check_index(folder, listed, self.infos)
        self._maps = {path: np.memmap(path, np.uint8, "r") for path in paths}

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file; nothing is read before it is touched."""
        info = self.infos[name]
        data = self._maps[info.path][info.start : info.start + info.num_bytes]
        return np.asarray(data).view(DTYPES[info.dtype]).reshape(info.shape)


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """Names and places of a file's tensors, in file order.

    Raises `CheckpointError` for a truncated file, a header that is not JSON, an unknown dtype, a byte range that
    does not fit its shape, overlaps and gaps.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} is truncated: {size} bytes with a header of {length} bytes"
            )
        if length > _LARGEST_HEADER:
            raise CheckpointError(f"{path}: header of {length} bytes exceeds {_LARGEST_HEADER}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is a JSON {type(header).__name__}, not an object")
    header.pop(_METADATA_KEY, None)
    ranges = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_ranges(path, ranges, size - 8 - length)
    ordered = sorted(ranges, key=lambda name: ranges[name][2:])
    return {
        name: TensorInfo(path, ranges[name][0], ranges[name][1], 8 + length + ranges[name][2])
        for name in ordered
    }


def write_file(path: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file. The bytes depend only on names and values: wide dtypes first, then by name.

    That order keeps every tensor aligned to its own element size. Raises `CheckpointError` for a dtype that the
    format lacks.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        array = tensors[name]
        if array.dtype not in _NAME_OF_DTYPE:
            raise CheckpointError(f"{name}: dtype {array.dtype} has no safetensors name")
        header[name] = {
            "dtype": _NAME_OF_DTYPE[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps({_METADATA_KEY: {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in header:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def write_folder(
    folder: str | Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int | None
) -> None:
    """Write `tensors` as one file, or as shards of at most `max_shard_bytes` of data with an index.

    Only one shard is held in memory. A tensor larger than the limit gets a file of its own. Raises
    `CheckpointError` when the folder already holds safetensors files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    existing = sorted(path.name for path in folder.glob("*.safetensors*"))
    if existing:
        raise CheckpointError(f"{folder} already holds {existing[0]}; write to an empty folder")
    written: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        path = folder / f"shard-{len(written) + 1}.partial"
        write_file(path, shard)
        written.append((path, list(shard)))
        total += sum(array.nbytes for array in shard.values())
    if len(written) == 1:
        written[0][0].rename(folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(written, start=1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _shards(
    tensors: Iterable[tuple[str, np.ndarray]], limit: int | None
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and limit is not None and size + array.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return result


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """One header entry as (dtype, shape, begin, end), bytes relative to the data section."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {name!r} needs dtype, shape and two data_offsets: {entry!r}"
        ) from error
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{path}: {name!r} has a negative or fractional size: {entry!r}")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name!r} has unknown dtype {dtype!r}; known: {', '.join(DTYPES)}"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name!r} spans {end - begin} bytes, but {dtype} {list(shape)} needs {expected}"
        )
    return dtype, shape, begin, end


def _check_ranges(
    path: Path, ranges: Mapping[str, tuple[str, tuple[int, ...], int, int]], available: int
) -> None:
    position = 0
    for name, (_, _, begin, end) in sorted(ranges.items(), key=lambda item: item[1][2:]):
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "follows a gap"
            raise CheckpointError(f"{path}: {name!r} {kind} (starts at {begin}, not {position})")
        position = end
    if position > available:
        raise CheckpointError(
            f"{path} is truncated: tensors need {position} bytes, {available} are there"
        )
    if position < available:
        raise CheckpointError(f"{path} has {available - position} bytes that no tensor owns")


def _read_index(folder: Path) -> tuple[list[Path], dict[str, str]]:
    path = folder / INDEX_NAME
    try:
        listed = json.loads(path.read_text())["weight_map"]
        files = sorted(set(listed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is not a file of this folder")
        if not (folder / file).exists():
            raise CheckpointError(f"{path} names {file!r}, which does not exist")
    return [folder / file for file in files], listed


def _check_index(folder: Path, listed: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> None:
    actual = {name: info.path.name for name, info in infos.items()}
    wrong = sorted(
        name for name in listed.keys() | actual.keys() if listed.get(name) != actual.get(name)
    )
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder / INDEX_NAME} and the files disagree about {len(wrong)} tensors, first "
            f"{name!r}: index says {listed.get(name)}, found in {actual.get(name)}"
        )
