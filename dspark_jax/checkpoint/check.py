"""Comparing the tensors of a folder with the entries that a configuration asks for."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dspark_jax.checkpoint.formats import fp4_shapes, fp8_scale_shape
from dspark_jax.checkpoint.names import Entry
from dspark_jax.checkpoint.safetensors import CheckpointError, TensorInfo
from dspark_jax.kernels.quantized import FP4_RUN, FP8_BLOCK

_SHOWN = 12  # names per kind of problem in an error message


class Storage(enum.Enum):
    """How a file keeps one tensor."""

    PLAIN = "plain"
    FP8 = "fp8"
    FP4 = "fp4"
    TABLE = "table"


_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_SCALE_DTYPES = ("F8_E8M0", "U8")


def check_tensors(
    folder: str | Path,
    entries: Sequence[Entry],
    infos: Mapping[str, TensorInfo],
    ignored: Collection[str] = (),
    *,
    keep_quantized: bool = False,
) -> dict[str, Storage]:
    """How each entry that the files have is kept there, by name.

    Raises `CheckpointError` listing all that is wrong at once: missing and unexpected tensors, wrong shapes and
    dtypes and, with `keep_quantized`, stacks that cannot stay quantised.
    """
    problems = _Problems()
    stored: dict[str, Storage] = {}
    known = set(ignored)
    any_optional = any(entry.optional and entry.name in infos for entry in entries)
    for entry in entries:
        known.add(entry.name)
        if entry.name not in infos:
            if any_optional or not entry.optional:
                problems.add("missing", entry.name)
            continue
        storage = _storage(entry, infos[entry.name])
        if storage is None:
            dtype = infos[entry.name].dtype
            problems.add("of a wrong dtype", f"{entry.name} ({dtype} for {entry.storage})")
            known.add(entry.scale_name)
            continue
        stored[entry.name] = storage
        _check_shape(entry.name, _stored_shape(entry, storage), infos, problems)
        if storage in (Storage.FP8, Storage.FP4):
            known.add(entry.scale_name)
            _check_scale(entry, storage, infos, problems)
    for name in infos.keys() - known:
        problems.add("unexpected", name)
    if keep_quantized:
        _check_stacks(entries, stored, problems)
    problems.raise_if_any(folder)
    return stored


class _Problems:
    """Problems by kind, for one error message."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        self._by_kind.setdefault(kind, []).append(text)

    def raise_if_any(self, folder: str | Path) -> None:
        if not self._by_kind:
            return
        lines = [f"the tensors of {folder} do not fit its config.json:"]
        for kind, texts in self._by_kind.items():
            shown = ", ".join(sorted(texts)[:_SHOWN])
            more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            lines.append(f"  {len(texts)} {kind}: {shown}{more}")
        raise CheckpointError("\n".join(lines))


def _storage(entry: Entry, info: TensorInfo) -> Storage | None:
    """How the file keeps the tensor, told by its dtype; None where that dtype makes no sense."""
    if entry.storage == "i64":
        return Storage.TABLE if info.dtype in ("I64", "I32") else None
    if info.dtype in _PLAIN_DTYPES:
        return Storage.PLAIN
    if entry.is_quantizable and info.dtype == "F8_E4M3":
        return Storage.FP8
    if entry.storage == "expert" and info.dtype in ("I8", "U8"):
        return Storage.FP4
    return None


def _stored_shape(entry: Entry, storage: Storage) -> tuple[int, ...]:
    if storage is Storage.FP4:
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return entry.shape


def _check_shape(
    name: str, expected: tuple[int, ...], infos: Mapping[str, TensorInfo], problems: _Problems
) -> None:
    actual = infos[name].shape
    if actual != expected:
        problems.add("of a wrong shape", f"{name} ({list(actual)} instead of {list(expected)})")


def _check_scale(
    entry: Entry, storage: Storage, infos: Mapping[str, TensorInfo], problems: _Problems
) -> None:
    name = entry.scale_name
    if storage is Storage.FP4 and entry.shape[-1] % FP4_RUN:
        problems.add("in fp4 with rows that are no multiple of 32", entry.name)
    elif name not in infos:
        problems.add("missing", name)
    elif infos[name].dtype not in _SCALE_DTYPES:
        problems.add("of a wrong dtype", f"{name} ({infos[name].dtype} for {_SCALE_DTYPES[0]})")
    else:
        fp8 = storage is Storage.FP8
        expected = fp8_scale_shape(entry.shape) if fp8 else fp4_shapes(entry.shape)[1]
        _check_shape(name, expected, infos, problems)


def _check_stacks(
    entries: Sequence[Entry], stored: Mapping[str, Storage], problems: _Problems
) -> None:
    """A stack stays quantised as a whole, and parts of a matrix must end on the edges of fp8 blocks."""
    first: dict[tuple[str, ...], Storage] = {}
    for entry in entries:
        storage = stored.get(entry.name)
        if storage is None:
            continue
        if first.setdefault(entry.path, storage) is not storage:
            problems.add(
                "kept otherwise than the rest of their stack (expand with keep_quantized=False)",
                entry.name,
            )
        if storage is Storage.FP8 and (entry.rows.stop or 0) % FP8_BLOCK:
            problems.add(
                f"to be joined inside a {FP8_BLOCK}-row block (expand with keep_quantized=False)",
                entry.name,
            )
