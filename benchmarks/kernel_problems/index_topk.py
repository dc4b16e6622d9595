"""The indexer's scores with the selection, and the selection alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_problems.problem import Problem, label
from benchmarks.kernel_timing import time_captured_ms, time_ms, torch_on_gpu
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.index_topk import cases as index_cases
from dspark_jax.kernels.index_topk import pallas_triton as index
from dspark_jax.kernels.rows import RowFormat, empty_keys, encode, gather


def index_topk_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Scores and selection: decode and prompt chunks over 2048 to 32768 entries."""
    bf16, fp8 = RowFormat.PLAIN, RowFormat.FP8
    for tokens, entries in ((64, 2048), (64, 32768), (512, 2048)):
        case = index_cases.decode_case(tokens, entries, **index_cases.FLASH)
        yield partial(_index_topk, case, bf16, dispatch)
    for tokens, entries, row_format in (
        (512, 32768, bf16),
        (2048, 2048, bf16),
        (2048, 8192, bf16),
        (2048, 8192, fp8),
    ):
        case = index_cases.prefill_case(tokens, entries, **index_cases.FLASH)
        yield partial(_index_topk, case, row_format, dispatch)
    for tokens, entries in ((64, 2048), (512, 32768), (2048, 2048), (2048, 8192)):
        yield partial(_select, tokens, entries, dispatch)


def _index_topk(case: index_cases.Case, row_format: RowFormat, dispatch: Dispatch) -> Problem:
    layers = 4
    like = empty_keys((), case.width, row_format, dtype=jnp.bfloat16)
    key_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(like))
    made = index_cases.make(case, 1, jnp.bfloat16)
    keys = jax.random.normal(
        jax.random.key(2), (layers, *made["index_keys"].shape[1:]), jnp.bfloat16
    )
    arrays = {k: v for k, v in made.items() if k not in ("layer", "k")} | {
        "index_keys": jax.jit(lambda keys: encode(keys, like))(keys)
    }
    tokens, entries = made["q"].shape[0], case.max_pages * case.per_page

    def run(tile, arrays, i):
        return index.index_topk_pallas(
            **arrays, layer=i % layers, k=case.k, dispatch=dispatch, tile=tile
        )

    def check() -> float:
        places, selected = jax.jit(partial(run, None))(arrays, jnp.int32(1))
        rows = np.unique(np.linspace(0, tokens - 1, 8).astype(int))
        return max(_choice_error(arrays, case, row, places[row], selected[row]) for row in rows)

    variants = {}
    for t, k, w, s in itertools.product((4, 8), (128, 256), (4, 8), (1, 2, 3)):
        tile = index.ScoreTile(tokens=t, keys=k, warps=w, stages=s)
        variants[label(tile)] = partial(run, tile)
    scored = tokens * entries
    flops = 2.0 * scored * case.heads * case.width
    return Problem(
        kernel="index_topk",
        case=f"{case.name} {'fp8 keys' if row_format is RowFormat.FP8 else 'bfloat16'}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=len(case.rows) * entries * key_bytes + 8.0 * scored,
        flops=flops,
        expected_ms=max(0.03, flops / 3e11),
        tile=index.default_score_tile(
            key_bytes=key_bytes // case.width, capability=dispatch.capability
        ),
        limit=1e-4,
        variants=variants,
    )


def _choice_error(
    arrays: Any, case: index_cases.Case, row: int, places: Any, selected: Any
) -> float:
    """By how much the lowest chosen score misses the k-th highest, relative to the largest; inf for repeats."""
    count, chosen = int(arrays["counts"][row]), np.asarray(places[: int(selected)])
    if len(set(chosen.tolist())) != min(count, case.k):
        return float("inf")
    number = np.arange(count)
    pages = np.asarray(arrays["page_table"])[int(arrays["slots"][row]), number // case.per_page]
    flat = pages * case.per_page + number % case.per_page
    keys = gather(arrays["index_keys"], (1, flat // case.per_page, flat % case.per_page))
    keys = keys.astype(jnp.float32)
    q = arrays["q"][row].astype(jnp.float32)
    dots = jax.nn.relu(jnp.einsum("nd,hd->nh", keys, q, precision="highest"))
    scores = np.asarray(dots @ arrays["head_weights"][row])
    where = {int(place): n for n, place in enumerate(flat)}
    worst = min(scores[where[int(place)]] for place in chosen)
    return float(max(0.0, np.sort(scores)[-len(chosen)] - worst) / np.abs(scores).max())


def _select(tokens: int, entries: int, dispatch: Dispatch) -> Problem:
    k, per_page = 512, 64
    scores = jax.random.normal(jax.random.key(3), (tokens, entries))
    table = jnp.arange(entries // per_page, dtype=jnp.int32)[None]
    slots = jnp.zeros(tokens, jnp.int32)

    def run(scores, i):
        counts = jnp.full(tokens, entries, jnp.int32) - i % 2
        return index.select(
            scores, counts, k=k, page_table=table, slots=slots, per_page=per_page, dispatch=dispatch
        )

    def check() -> float:
        chosen = np.sort(np.asarray(jax.jit(run)(scores, jnp.int32(0))), axis=1)
        expected = np.sort(np.asarray(jax.lax.top_k(scores, k)[1]), axis=1)
        return 0.0 if (chosen == expected).all() else float("inf")

    def lax_top_k() -> float:
        return time_ms(lambda s, i: jax.lax.top_k(s + i.astype(s.dtype), k), scores, 0.5)

    peers = {"lax.top_k": lax_top_k}
    if torch_on_gpu() is not None:
        peers["torch.topk"] = partial(_torch_topk_ms, tokens, entries, k)
    return Problem(
        kernel="select",
        case=f"{k} of {tokens}x{entries}",
        arguments=scores,
        run=run,
        check=check,
        num_bytes=4.0 * tokens * (entries + k),
        flops=0.0,
        expected_ms=max(0.01, tokens * entries * 2e-8),
        peers=peers,
    )


def _torch_topk_ms(tokens: int, entries: int, k: int) -> float:
    """Time in ms of choosing k of each row, in any order, as `select` does."""
    import torch

    scores = torch.randn(tokens, entries, device="cuda")
    return time_captured_ms(lambda i: torch.topk(scores, k, sorted=False), 0.1)
