"""`sparse_mla`: the interpreted kernel against the reference, on poisoned inputs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.rows import RowFormat, decode
from dspark_jax.kernels.sparse_mla import sparse_mla
from dspark_jax.kernels.sparse_mla.cases import TEST_CASES, Case, Row, make
from dspark_jax.kernels.sparse_mla.pallas_triton import Tile, default_tile, sparse_mla_pallas
from tests.parity.compare import BFLOAT16_OP, FLOAT32_OP, assert_close
from tests.seeds import fresh_seed

INTERPRETED = Dispatch(Backend.PALLAS, interpret=True)


# Interpreted fp8 rows compile for ten seconds a case: the ordinary run has those that differ most.
QUICK_FP8 = ("one_late_token", "mixed_lengths", "no_valid_entry", "much_of_a_long_list")


@pytest.mark.parametrize(
    ("case", "row_format"),
    [
        pytest.param(
            case,
            row_format,
            id=f"{case.name}-{row_format.value}",
            marks=[pytest.mark.slow]
            if row_format is RowFormat.FP8 and case.name not in QUICK_FP8
            else [],
        )
        for case in TEST_CASES
        for row_format in (RowFormat.PLAIN, RowFormat.FP8)
    ],
)
def test_default_tile(case: Case, row_format: RowFormat) -> None:
    arguments = make(case, fresh_seed(), jnp.float32, row_format=row_format)
    expected = sparse_mla(**arguments, dispatch=Dispatch())
    assert np.isfinite(np.asarray(expected)).all()
    assert_close(sparse_mla(**arguments, dispatch=INTERPRETED), expected, FLOAT32_OP, case.name)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_and_splits(splits: int) -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.float32)
    tile = Tile(heads=16, keys=16, step_keys=16, part=16, splits=splits, warps=4, stages=1)
    out = sparse_mla_pallas(**arguments, dispatch=INTERPRETED, tile=tile)
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), FLOAT32_OP)


def test_bfloat16_rows() -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.bfloat16)
    out = sparse_mla(**arguments, dispatch=INTERPRETED)
    assert out.dtype == jnp.bfloat16
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), BFLOAT16_OP)


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Neighbours in the last channels of x [..., D], as complex numbers, times angles [R/2] of modulus one."""
    kept, tail = np.split(x, [x.shape[-1] - 2 * angles.shape[-1]], axis=-1)
    pairs = (tail[..., 0::2] + 1j * tail[..., 1::2]) * angles
    return np.concatenate([kept, np.stack([pairs.real, pairs.imag], -1).reshape(tail.shape)], -1)


def by_hand(arguments: dict[str, Any]) -> np.ndarray:
    """The definition token by token in float64, for rows in numbers."""
    given = {k: np.asarray(v) for k, v in arguments.items() if k != "rotation" and v is not None}
    window, entries = given["window"][1], given["entries"][1]
    entries = entries.reshape(-1, entries.shape[-1])
    length, out = len(window[0]), np.zeros(given["q"].shape)
    for t in np.flatnonzero(given["is_token"]):
        position, start = given["positions"][t], given["starts"][t]
        seen = np.arange(max(0, position - length + 1), position + 1)
        ring, step = seen[seen < start], seen[seen >= start]
        chosen = given["entry_places"][t, : given["entry_counts"][t]]
        rows = np.concatenate(
            [
                window[given["slots"][t], ring % length],
                given["step_rows"][given["row_heads"][t] + step - start],
                entries[chosen],
            ]
        ).astype(np.float64)
        angles = np.zeros(0)
        if arguments["rotation"] is not None:
            cos, sin = arguments["rotation"]
            angles = np.asarray(cos[t] + 1j * sin[t])
        q = given["q"][t].astype(np.float64)
        q /= np.sqrt(np.mean(q**2, axis=-1, keepdims=True) + given["norm_eps"])
        weights = np.exp(turned(q, angles) @ rows.T * q.shape[-1] ** -0.5)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(given["attn_sink"])[:, None]
        out[t] = turned(weights / total @ rows, angles.conj())
    return out


@pytest.mark.parametrize(("block", "splits"), [(16, 3), (64, 1)])
@pytest.mark.parametrize(
    ("row_format", "width", "rotary", "part"),
    [
        (RowFormat.PLAIN, 32, 0, 32),
        (RowFormat.PLAIN, 32, 8, 32),
        (RowFormat.PLAIN, 64, 24, 16),  # channels to turn begin within a part
        (RowFormat.FP8, 32, 8, 32),
        (RowFormat.FP8, 200, 40, 32),  # the last part is wider than what it holds
    ],
)
def test_queries_come_as_projected(
    row_format: RowFormat, width: int, rotary: int, part: int, block: int, splits: int
) -> None:
    rows = Row(5, 3), Row(63, 1)
    case = Case("", rows, heads=3, width=width, window=8, listed=24, padding=1, rotary=rotary)
    arguments = make(case, fresh_seed(), jnp.float32, row_format=row_format)
    # A head of zeros, and heads whose mean square is about as large as what is added to it.
    arguments["q"] = arguments["q"].at[0, 1].set(0).at[1].multiply(1e-3)
    expected = by_hand(in_numbers(arguments))
    tile = Tile(heads=block, keys=16, step_keys=16, part=part, splits=splits, warps=4, stages=1)
    out = sparse_mla_pallas(**arguments, dispatch=INTERPRETED, tile=tile)
    assert_close(out, expected, FLOAT32_OP)
    assert_close(sparse_mla(**arguments, dispatch=Dispatch()), expected, FLOAT32_OP)


def in_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with ring and entries as float32 arrays."""
    return arguments | {name: decode(arguments[name]) for name in ("window", "entries")}


@pytest.mark.parametrize("row_format", [RowFormat.ROUNDED, RowFormat.FP8], ids=["rounded", "fp8"])
def test_a_format_attends_as_the_numbers_that_it_holds(row_format: RowFormat) -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.float32, row_format=row_format)
    out = sparse_mla(**arguments, dispatch=Dispatch())
    np.testing.assert_array_equal(out, sparse_mla(**in_numbers(arguments), dispatch=Dispatch()))
    assert_close(sparse_mla(**arguments, dispatch=INTERPRETED), out, FLOAT32_OP)


@pytest.mark.parametrize(
    ("width", "rotary", "splits"),
    [
        pytest.param(128, 64, 1, marks=pytest.mark.slow),
        (200, 40, 3),
        pytest.param(272, 16, 1, marks=pytest.mark.slow),
        (344, 64, 3),
    ],
)
def test_fp8_rows_of_any_width(width: int, rotary: int, splits: int) -> None:
    """Short last blocks, more words of scales than one, rows that are no power of two."""
    case = Case(
        "",
        (Row(5, 2), Row(63, 1)),
        heads=3,
        width=width,
        window=8,
        listed=24,
        padding=1,
        rotary=rotary,
    )
    arguments = make(case, fresh_seed(), jnp.float32, row_format=RowFormat.FP8)
    tile = Tile(heads=16, keys=16, step_keys=16, part=16, splits=splits, warps=4, stages=1)
    out = sparse_mla_pallas(**arguments, dispatch=INTERPRETED, tile=tile)
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), FLOAT32_OP)


def test_fp8_rows_beside_bfloat16_queries() -> None:
    """Then the kernel works in float16."""
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.bfloat16, row_format=RowFormat.FP8)
    out = sparse_mla(**arguments, dispatch=INTERPRETED)
    assert out.dtype == jnp.bfloat16
    assert_close(out, sparse_mla(**arguments, dispatch=Dispatch()), BFLOAT16_OP)


def test_few_tokens_are_split_and_many_are_not() -> None:
    sizes = {"heads": 64, "width": 512, "rows": 640, "itemsize": 2, "capability": 90}
    splits = [default_tile(tokens=tokens, **sizes).splits for tokens in (1, 16, 64, 256, 2048)]
    assert splits == [11, 8, 2, 1, 1]
    tiles = [default_tile(tokens=tokens, **sizes, is_fp8=True) for tokens in (16, 64, 256, 2048)]
    assert [(t.heads, t.warps, t.keys) for t in tiles] == 4 * [(64, 8, 64)]
    assert [(t.splits, t.stages) for t in tiles] == [(8, 1), (2, 5), (1, 5), (1, 5)]


@pytest.mark.parametrize("dispatch", [Dispatch(), INTERPRETED], ids=["reference", "interpreted"])
def test_queries_may_come_ready(dispatch: Dispatch) -> None:
    case = next(c for c in TEST_CASES if c.name == "mixed_lengths")
    arguments = make(case, fresh_seed(), jnp.float32)
    q = np.asarray(arguments["q"], np.float64)
    q /= np.sqrt(np.mean(q**2, axis=-1, keepdims=True) + arguments["norm_eps"])
    cos, sin = (np.asarray(angle)[:, None] for angle in arguments["rotation"])
    ready = {"q": jnp.asarray(turned(q, cos + 1j * sin), jnp.float32), "norm_eps": None}
    expected = sparse_mla(**arguments, dispatch=Dispatch())
    assert_close(sparse_mla(**arguments | ready, dispatch=dispatch), expected, FLOAT32_OP)
