"""Sparse attention of decode steps and of a prompt chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernel_problems.problem import Problem, label, nearest, relative_error
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.rows import RowFormat, empty_rows, encode
from dspark_jax.kernels.sparse_mla import cases as mla_cases
from dspark_jax.kernels.sparse_mla import pallas_triton as mla
from dspark_jax.kernels.sparse_mla.reference import sparse_mla_reference

POOL = 131072
"""Entries per layer: with six layers far more than the level-two cache holds."""


def sparse_mla_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Decode steps at Flash and Pro sizes, and a prompt chunk: 128 window rows and 512 or 1024 entries.

    Queries are ready, as peers take them, but for the cases that say otherwise.
    """
    for tokens in (1, 16, 64, 256, 1024, 2048):
        case = mla_cases.decode_case(tokens, **mla_cases.FLASH)
        yield partial(_sparse_mla, "flash", case, dispatch)
    for tokens in (16, 64, 256, 2048):
        case = mla_cases.decode_case(tokens, **mla_cases.FLASH)
        yield partial(_sparse_mla, "flash", case, dispatch, raw=True)
    for tokens in (16, 64, 256, 2048):
        case = mla_cases.decode_case(tokens, **mla_cases.FLASH)
        yield partial(_sparse_mla, "flash", case, dispatch, RowFormat.FP8)
    yield partial(_sparse_mla, "flash", mla_cases.prefill_case(2048, **mla_cases.FLASH), dispatch)
    for tokens in (16, 256):
        case = mla_cases.decode_case(tokens, listed=1024, **mla_cases.PRO)
        yield partial(_sparse_mla, "pro", case, dispatch)


def _sparse_mla(
    model: str,
    case: mla_cases.Case,
    dispatch: Dispatch,
    row_format: RowFormat = RowFormat.PLAIN,
    *,
    raw: bool = False,
) -> Problem:
    layers, pool = 6, POOL
    is_fp8 = row_format is RowFormat.FP8
    like = empty_rows((), case.width, row_format, num_rotary=case.rotary, dtype=jnp.bfloat16)
    store = jax.jit(lambda rows: encode(rows, like))
    made = mla_cases.make(case, 1, jnp.bfloat16)
    key = jax.random.key(2)
    arrays = {k: v for k, v in made.items() if k not in ("layer", "entry_layer", "norm_eps")}
    # Every row may be read: fresh numbers in place of the poison, more layers and a larger pool.
    window = jax.random.normal(key, (layers, *made["window"].shape[1:]), jnp.bfloat16)
    entries = jax.random.normal(key, (layers, pool // 64, 64, case.width), jnp.bfloat16)
    tokens = made["q"].shape[0]
    arrays |= {
        "window": store(window),
        "entries": store(entries),
        "step_rows": jnp.nan_to_num(made["step_rows"]),
        "entry_places": jax.random.randint(key, (tokens, case.listed), 0, pool),
        "entry_counts": jnp.full(tokens, case.listed, jnp.int32),
    }

    norm_eps = mla_cases.NORM_EPS if raw else None

    def run(tile, arrays, i):
        layer = i % layers
        return mla.sparse_mla_pallas(
            **arrays,
            layer=layer,
            entry_layer=layer,
            norm_eps=norm_eps,
            dispatch=dispatch,
            tile=tile,
        )

    def check() -> float:
        where = {"layer": jnp.int32(1), "entry_layer": jnp.int32(1)}
        reference = partial(sparse_mla_reference, norm_eps=norm_eps)
        expected = jax.jit(reference)(**arrays, **where)
        return relative_error(jax.jit(partial(run, None))(arrays, jnp.int32(1)), expected)

    rows = case.window + case.listed
    default = mla.default_tile(
        tokens=tokens,
        heads=case.heads,
        width=case.width,
        rows=rows,
        itemsize=2,
        capability=dispatch.capability,
        is_fp8=is_fp8,
    )
    variants = {}
    tiles = [
        mla.Tile(heads, keys, step_keys, part, splits, warps, stages)
        for heads, keys, step_keys, part, splits, warps, stages in itertools.product(
            (32, 64),
            (32, 64, 128),
            (16, 64),
            (default.part,) if is_fp8 else (128, 256, 512),
            sorted({default.splits, 1, 2 * default.splits} if tokens <= 256 else {1}),
            (4, 8),
            (1, 2, 3, 4, 5),
        )
        if step_keys <= keys and splits <= 10
    ]
    # Heads and warps go together: each warp sums for eight heads.
    for tile in nearest(tiles, default, most=3):
        if tile.warps == tile.heads // 8:
            variants[label(tile)] = partial(run, tile)
    seen = tokens * rows
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(like))
    return Problem(
        kernel="sparse_mla",
        case=f"{model} {case.name}{' fp8 rows' if is_fp8 else ''}{' raw queries' if raw else ''}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=row_bytes * seen + 4.0 * case.width * tokens * case.heads,
        flops=4.0 * seen * case.heads * case.width,
        expected_ms=max(0.02, seen * case.heads * case.width * 4 / 2e11),
        tile=default,
        variants=variants,
    )
