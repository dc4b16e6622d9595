"""The kernel benchmark's problems: arguments at published sizes, costs, checks, peers."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_timing import time_ms, time_torch_ms, torch_on_gpu
from dspark_jax.decode.allocate import allocate
from dspark_jax.kernels import compress as compress_op
from dspark_jax.kernels import hyper as hyper_op
from dspark_jax.kernels.compress import cases as compress_cases
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.expert_mlp import cases as expert_cases
from dspark_jax.kernels.expert_mlp import pallas_triton as expert
from dspark_jax.kernels.expert_mlp.plan import make_plan
from dspark_jax.kernels.expert_mlp.reference import expert_mlp_reference
from dspark_jax.kernels.hyper import cases as hyper_cases
from dspark_jax.kernels.hyper import pallas_triton as hyper
from dspark_jax.kernels.index_topk import cases as index_cases
from dspark_jax.kernels.index_topk import pallas_triton as index
from dspark_jax.kernels.linear import cases as linear_cases
from dspark_jax.kernels.linear import pallas_triton as linear
from dspark_jax.kernels.linear.reference import stacked_linear_reference
from dspark_jax.kernels.quantized import take
from dspark_jax.kernels.sparse_mla import cases as mla_cases
from dspark_jax.kernels.sparse_mla import pallas_triton as mla
from dspark_jax.kernels.sparse_mla.reference import sparse_mla_reference

POOL = 131072
"""Entries per layer: with six layers far more than the level-two cache holds."""

Run = Callable[[Any, jax.Array], Any]


@dataclass
class Problem:
    """One line of the table.

    `run(arguments, i)` is timed; i picks a layer of the stacks. `check` returns the largest error of one call
    relative to the reference's largest value. `variants` are other tile sizes, timed by `--tune`. `peers` give
    the time of another implementation in ms.
    """

    kernel: str
    case: str
    arguments: Any
    run: Run
    check: Callable[[], float]
    num_bytes: float
    flops: float
    expected_ms: float
    tile: Any = None
    limit: float = 2e-2
    variants: dict[str, Run] = field(default_factory=dict)
    peers: dict[str, Callable[[], float]] = field(default_factory=dict)


def relative_error(actual: Any, expected: Any) -> float:
    """Largest difference over the largest expected value; infinite where either is not finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def _nearest(tiles: list[Any], default: Any, *, most: int) -> list[Any]:
    """Tiles that differ from the default in 1 to `most` sizes, nearest first."""
    distances = [(_differing(tile, default), n, tile) for n, tile in enumerate(tiles)]
    return [tile for distance, _, tile in sorted(distances) if 0 < distance <= most]


def _differing(a: Any, b: Any) -> int:
    """In how many sizes two tiles differ."""
    return sum(x != y for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b)))


def label(tile: Any) -> str:
    """Short text of a tile's numbers."""
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(tile).items())


# --- sparse attention --------------------------------------------------------------------------


def sparse_mla_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Decode steps at Flash and Pro sizes, and a prompt chunk: 128 window rows and 512 or 1024 entries."""
    for tokens in (1, 16, 64, 256, 1024, 2048):
        case = mla_cases.decode_case(tokens, **mla_cases.FLASH)
        yield partial(_sparse_mla, "flash", case, dispatch)
    yield partial(_sparse_mla, "flash", mla_cases.prefill_case(2048, **mla_cases.FLASH), dispatch)
    for tokens in (16, 256):
        case = mla_cases.decode_case(tokens, listed=1024, **mla_cases.PRO)
        yield partial(_sparse_mla, "pro", case, dispatch)


def _sparse_mla(model: str, case: mla_cases.Case, dispatch: Dispatch) -> Problem:
    layers, pool = 6, POOL
    made = mla_cases.make(case, 1, jnp.bfloat16)
    key = jax.random.key(2)
    arrays = {k: v for k, v in made.items() if k not in ("layer", "entry_layer")}
    # Every row may be read: fresh numbers in place of the poison, more layers and a larger pool.
    window = jax.random.normal(key, (layers, *made["window"].shape[1:]), jnp.bfloat16)
    entries = jax.random.normal(key, (layers, pool // 64, 64, case.width), jnp.bfloat16)
    tokens = made["q"].shape[0]
    arrays |= {
        "window": window,
        "entries": entries,
        "step_rows": jnp.nan_to_num(made["step_rows"]),
        "entry_places": jax.random.randint(key, (tokens, case.listed), 0, pool),
        "entry_counts": jnp.full(tokens, case.listed, jnp.int32),
    }

    def run(tile, arrays, i):
        layer = i % layers
        return mla.sparse_mla_pallas(
            **arrays, layer=layer, entry_layer=layer, dispatch=dispatch, tile=tile
        )

    def check() -> float:
        where = {"layer": jnp.int32(1), "entry_layer": jnp.int32(1)}
        expected = jax.jit(sparse_mla_reference)(**arrays, **where)
        return relative_error(jax.jit(partial(run, None))(arrays, jnp.int32(1)), expected)

    rows = case.window + case.listed
    default = mla.default_tile(
        tokens=tokens,
        heads=case.heads,
        width=case.width,
        rows=rows,
        itemsize=2,
        capability=dispatch.capability,
    )
    variants = {}
    tiles = [
        mla.Tile(heads, keys, step_keys, part, splits, warps, stages)
        for heads, keys, step_keys, part, splits, warps, stages in itertools.product(
            (32, 64),
            (32, 64, 128),
            (16, 64),
            (128, 256, 512),
            sorted({default.splits, 1, 2 * default.splits} if tokens <= 256 else {1}),
            (4, 8),
            (1, 2, 3, 4, 5),
        )
        if step_keys <= keys and splits <= 10
    ]
    # Heads and warps go together: each warp sums for eight heads.
    for tile in _nearest(tiles, default, most=3):
        if tile.warps == tile.heads // 8:
            variants[label(tile)] = partial(run, tile)
    seen = tokens * rows
    return Problem(
        kernel="sparse_mla",
        case=f"{model} {case.name}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=2.0 * case.width * (seen + 2 * tokens * case.heads),
        flops=4.0 * seen * case.heads * case.width,
        expected_ms=max(0.02, seen * case.heads * case.width * 4 / 2e11),
        tile=default,
        variants=variants,
        peers=_flash_mla_peers(tokens, case.heads, rows),
    )


def _flash_mla_peers(tokens: int, heads: int, rows: int) -> dict[str, Callable[[], float]]:
    """FlashMLA's sparse forward over bfloat16 rows of 576 channels (512 of them values), if it is installed."""
    torch = torch_on_gpu()
    if torch is None or importlib.util.find_spec("flash_mla") is None:
        return {}
    import flash_mla  # pyright: ignore[reportMissingImports]

    def measure() -> float:
        q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
        pool = torch.randn(POOL, 1, 576, device="cuda", dtype=torch.bfloat16)
        places = torch.randint(0, POOL, (tokens, 1, rows), device="cuda", dtype=torch.int32)
        return time_torch_ms(lambda: flash_mla.flash_mla_sparse_fwd(q, pool, places, 576**-0.5))

    return {"FlashMLA bf16, 576 channels": measure}


# --- indexer -----------------------------------------------------------------------------------


def index_topk_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Scores and selection: decode and prompt chunks over 2048 to 32768 entries."""
    bf16, fp8 = jnp.bfloat16, jnp.float8_e4m3fn
    for tokens, entries in ((64, 2048), (64, 32768), (512, 2048)):
        case = index_cases.decode_case(tokens, entries, **index_cases.FLASH)
        yield partial(_index_topk, case, bf16, dispatch)
    for tokens, entries, dtype in (
        (512, 32768, bf16),
        (2048, 2048, bf16),
        (2048, 8192, bf16),
        (2048, 8192, fp8),
    ):
        case = index_cases.prefill_case(tokens, entries, **index_cases.FLASH)
        yield partial(_index_topk, case, dtype, dispatch)
    for tokens, entries in ((64, 2048), (512, 32768), (2048, 2048), (2048, 8192)):
        yield partial(_select, tokens, entries, dispatch)


def _index_topk(case: index_cases.Case, dtype: Any, dispatch: Dispatch) -> Problem:
    layers = 4
    made = index_cases.make(case, 1, jnp.bfloat16)
    keys = jax.random.normal(
        jax.random.key(2), (layers, *made["index_keys"].shape[1:]), jnp.bfloat16
    )
    arrays = {k: v for k, v in made.items() if k not in ("layer", "k")} | {
        "index_keys": keys.astype(dtype)
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
        case=f"{case.name} {jnp.dtype(dtype).name}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=len(case.rows) * entries * case.width * jnp.dtype(dtype).itemsize + 8.0 * scored,
        flops=flops,
        expected_ms=max(0.03, flops / 3e11),
        tile=index.default_score_tile(
            key_bytes=jnp.dtype(dtype).itemsize, capability=dispatch.capability
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
    keys = arrays["index_keys"][1].reshape(-1, case.width)[flat].astype(jnp.float32)
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
    torch = torch_on_gpu()
    if torch is not None:
        other = torch.randn(tokens, entries, device="cuda")
        peers["torch.topk"] = lambda: time_torch_ms(lambda: torch.topk(other, k))
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


# --- experts -----------------------------------------------------------------------------------


def expert_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Routed experts at Flash sizes in every storage, with uneven routing."""
    for storage, sizes in (
        ("fp4", (8, 64, 256, 512, 1024, 2048, 8192)),
        ("fp8", (64, 2048)),
        ("plain", (64, 512)),
    ):
        # One stack serves all sizes of a storage; made when the first of them runs.
        stack = _LazyStack(storage)
        for tokens in sizes:
            yield partial(_expert, tokens, storage, stack, dispatch)


@dataclass
class _LazyStack:
    storage: str
    weights: Any = None

    def get(self) -> Any:
        if self.weights is None:
            # More than 4 GiB of one-byte weights, see `triton_call`.
            layers = {"fp4": 5, "fp8": 3, "plain": 2}[self.storage]
            size = expert_cases.FLASH
            up = (1, size["experts"], 2 * size["width"], size["model"])
            down = (1, size["experts"], size["model"], size["width"])
            self.weights = tuple(
                jax.tree.map(
                    lambda x: jnp.concatenate([x] * layers),
                    jax.jit(_finite_weight, static_argnums=(1, 2))(
                        jax.random.key(n), shape, self.storage
                    ),
                )
                for n, shape in enumerate((up, down))
            )
        return self.weights


def _finite_weight(key: jax.Array, shape: tuple[int, ...], storage: str) -> Any:
    return expert_cases.random_weight(key, shape, storage, jnp.bfloat16)


def _expert(tokens: int, storage: str, stack: _LazyStack, dispatch: Dispatch) -> Problem:
    size = expert_cases.FLASH
    w_gate_up, w_down = stack.get()
    layers = w_gate_up.shape[0]
    case = expert_cases.Case(
        "", tokens, storage="plain", **(size | {"model": 16, "width": 16}), layers=1
    )
    made = expert_cases.make(case, 4, jnp.bfloat16)
    arrays = {
        "x": jax.random.normal(jax.random.key(5), (tokens, size["model"]), jnp.bfloat16),
        "expert_ids": made["expert_ids"],
        "weights": made["weights"],
        "w_gate_up": w_gate_up,
        "w_down": w_down,
    }

    def run(tile, arrays, i):
        return expert.expert_mlp_pallas(
            **arrays, layer=i % layers, limit=10.0, dispatch=dispatch, tile=tile
        )

    def check() -> float:
        some = np.unique(np.linspace(0, tokens - 1, 4).astype(int))
        subset = {k: arrays[k][some] for k in ("x", "expert_ids", "weights")}
        expected = jax.jit(partial(expert_mlp_reference, layer=0, limit=10.0))(
            **subset, w_gate_up=take(w_gate_up, (slice(1, 2),)), w_down=take(w_down, (slice(1, 2),))
        )
        return relative_error(jax.jit(partial(run, None))(arrays, jnp.int32(1))[some], expected)

    default = expert.default_tile(
        assignments=tokens * size["k"],
        experts=size["experts"],
        plain=storage == "plain",
        capability=dispatch.capability,
    )
    variants = {}
    # A tile of fp8 or fp4 weights is at most 128 columns of the input deep.
    depths = (32, 64, 128) if storage == "plain" else (128,)
    rows = [r for r in (default.rows // 2, default.rows, 2 * default.rows) if r >= 16]
    tiles = [
        expert.Tile(*sizes)
        for sizes in itertools.product(rows, (64, 128, 256), depths, (4, 8), (2, 3, 4, 5))
    ]
    for tile in _nearest(tiles, default, most=4):
        variants[label(tile)] = partial(run, tile)
    active = len(np.unique(np.asarray(made["expert_ids"])))
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves((w_gate_up, w_down))) / layers
    flops = 2.0 * tokens * size["k"] * 3 * size["model"] * size["width"]
    peers = {}
    if storage == "plain":
        peers["lax.ragged_dot"] = partial(_ragged_dot_ms, arrays, active)
    return Problem(
        kernel="expert_mlp",
        case=f"{storage} {tokens} tokens, {active} experts",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=weight_bytes * active / size["experts"],
        flops=flops,
        expected_ms=max(0.2, flops / 2e11),
        tile=default,
        variants=variants,
        peers=peers,
    )


def _ragged_dot_ms(arrays: Any, active: int) -> float:
    """Gate-up and down products alone by `lax.ragged_dot`, on the first layer, rows already sorted."""
    ids = arrays["expert_ids"].reshape(-1)
    sizes = jnp.bincount(ids, length=arrays["w_gate_up"].shape[1]).astype(jnp.int32)
    up, down = (jnp.swapaxes(arrays[n][0], 1, 2) for n in ("w_gate_up", "w_down"))
    rows = jnp.repeat(arrays["x"], arrays["expert_ids"].shape[1], axis=0)

    def run(operands, i):
        rows, up, down, sizes = operands
        hidden = jax.lax.ragged_dot(rows + i.astype(rows.dtype), up, sizes)
        return jax.lax.ragged_dot(hidden[:, : down.shape[1]], down, sizes)

    return time_ms(run, (rows, up, down, sizes), 5.0)


def plan_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Sorting and tiling alone."""
    for tokens in (64, 2048):
        yield partial(_plan, tokens, dispatch)


def _plan(tokens: int, dispatch: Dispatch) -> Problem:
    size = expert_cases.FLASH
    ids = jax.random.randint(jax.random.key(6), (tokens, size["k"]), 0, size["experts"])

    def run(ids, i):
        shifted = (ids + i) % size["experts"]
        return tuple(make_plan(shifted, experts=size["experts"], rows=16, dispatch=dispatch))

    def check() -> float:
        order = np.asarray(jax.jit(run)(ids, jnp.int32(0))[0])
        expected = np.argsort(np.asarray(ids).reshape(-1), stable=True)
        return 0.0 if (order == expected).all() else float("inf")

    def argsort() -> float:
        return time_ms(lambda ids, i: jnp.argsort((ids + i).reshape(-1)), ids, 0.05)

    return Problem(
        kernel="expert_plan",
        case=f"{tokens} tokens",
        arguments=ids,
        run=run,
        check=check,
        num_bytes=4.0 * ids.size,
        flops=0.0,
        expected_ms=0.02,
        peers={"jnp.argsort": argsort},
    )


# --- linears -----------------------------------------------------------------------------------


def linear_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """All linears of a Flash layer one after the other, read from stacks of layers."""
    for storage, sizes in (("fp8", (1, 16, 64, 256, 512, 1024, 2048)), ("plain", (16, 256, 1024))):
        for tokens in sizes:
            yield partial(_linear, tokens, storage, dispatch)


def _linear(tokens: int, storage: str, dispatch: Dispatch) -> Problem:
    layers = 4
    arrays = {}
    for number, (name, (outputs, inner, groups)) in enumerate(linear_cases.FLASH.items()):
        x_key, w_key = jax.random.split(jax.random.key(number))
        shape = (1, groups * outputs, inner)
        layer = jax.jit(_finite_weight, static_argnums=(1, 2))(w_key, shape, storage)
        stack = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * layers), layer)
        arrays[name] = jax.random.normal(x_key, (tokens, groups, inner), jnp.bfloat16), stack

    def tile_of(name: str) -> linear.Tile:
        outputs, inner, groups = linear_cases.FLASH[name]
        return linear.default_tile(
            tokens=tokens,
            outputs=outputs * groups,
            inner=inner,
            plain=storage == "plain",
            capability=dispatch.capability,
        )

    def run(change, arrays, i):
        return {
            name: linear.stacked_linear_pallas(
                x, stack, layer=i % layers, dispatch=dispatch, tile=change(tile_of(name))
            )
            for name, (x, stack) in arrays.items()
        }

    def expanded(arrays, i):
        return {
            name: stacked_linear_reference(x, stack, layer=i % layers)
            for name, (x, stack) in arrays.items()
        }

    def check() -> float:
        outs = jax.jit(partial(run, lambda tile: tile))(arrays, jnp.int32(1))
        expected = jax.jit(expanded)(arrays, jnp.int32(1))
        return max(relative_error(outs[name], expected[name]) for name in arrays)

    variants = {}
    for sizes in (
        {"columns": 32},
        {"columns": 64},
        {"rows": 16},
        {"rows": 32},
        {"rows": 128, "warps": 8},
        {"rows": 128},
        {"depth": 64},
        {"stages": 2},
        {"stages": 5},
        {"warps": 8},
        {"splits": 1},
        {"splits": 2},
        {"splits": 8},
        {"columns": 64, "splits": 4},
        {"columns": 32, "splits": 4},
    ):
        change = partial(dataclasses.replace, **sizes)
        variants[" ".join(f"{k}={v}" for k, v in sizes.items())] = partial(
            run, lambda tile, change=change: change(tile)
        )
    stacks = [stack for _, stack in arrays.values()]
    weights = sum(int(np.prod(stack.shape[1:])) for stack in stacks)
    return Problem(
        kernel="linear",
        case=f"{storage} {tokens} tokens",
        arguments=arrays,
        run=partial(run, lambda tile: tile),
        check=check,
        num_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(stacks)) / layers,
        flops=2.0 * tokens * weights,
        expected_ms=max(0.1, tokens * weights * 2 / 2.5e11),
        tile=tile_of("w_o_b"),
        variants=variants,
        peers={"expanded, XLA": lambda: time_ms(expanded, arrays, 0.5)},
    )


# --- allocation --------------------------------------------------------------------------------


def allocate_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """The budget over all pending drafts: XLA on every device, no kernel of ours."""
    del dispatch
    for rows in (16, 256):
        yield partial(_allocate, rows, 7)


def _allocate(rows: int, drafts: int) -> Problem:
    confidences = jax.random.uniform(jax.random.key(11), (rows, drafts))
    caps = jnp.full(rows, drafts, jnp.int32)
    total = rows * drafts

    def run(arrays, i):
        confidences, caps = arrays
        return allocate(confidences, caps, total // 2 + i % 2)

    def check() -> float:
        lens = np.asarray(jax.jit(run)((confidences, caps), jnp.int32(0)))
        survival = np.cumprod(np.asarray(confidences), axis=1)
        expected = (survival >= np.sort(survival.ravel())[-(total // 2)]).sum(axis=1)
        return 0.0 if (lens == expected).all() else float("inf")

    peers: dict[str, Callable[[], float]] = {}
    torch = torch_on_gpu()
    if torch is not None:
        peers["torch.compile"] = partial(_torch_allocate_ms, torch, confidences, total // 2)
    return Problem(
        kernel="allocate",
        case=f"{rows} requests of {drafts}",
        arguments=(confidences, caps),
        run=run,
        check=check,
        num_bytes=8.0 * total,
        flops=0.0,
        expected_ms=0.05,
        peers=peers,
    )


def _torch_allocate_ms(torch: Any, confidences: jax.Array, budget: int) -> float:
    rows, drafts = confidences.shape
    given = torch.tensor(np.asarray(confidences), device="cuda")
    caps = torch.full((rows,), drafts, device="cuda")

    @torch.compile(mode="reduce-overhead")
    def admitted(given: Any, caps: Any) -> Any:
        survival = torch.cumprod(given.clamp(0, 1), dim=1)
        closed = torch.arange(drafts, device="cuda") >= caps[:, None]
        order = torch.argsort(
            survival.masked_fill(closed, -1.0).T.reshape(-1), descending=True, stable=True
        )
        rank = torch.empty_like(order)
        rank[order] = torch.arange(rows * drafts, device="cuda")
        return ((budget > rank.reshape(drafts, rows).T) & ~closed).sum(dim=1)

    return time_torch_ms(lambda: admitted(given, caps))


# --- hyper-connections and compressor ----------------------------------------------------------


def hyper_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Into and out of a block at Flash and Pro widths."""
    for tokens, model in ((16, 4096), (256, 4096), (2048, 4096), (256, 7168)):
        yield partial(_hyper_enter, tokens, model, dispatch)
        yield partial(_hyper_leave, tokens, model, dispatch)


def _hyper_enter(tokens: int, model: int, dispatch: Dispatch) -> Problem:
    made = hyper_cases.make(hyper_cases.Case("", tokens, model), 7, jnp.bfloat16)
    layers = 8
    stacks = {k: jnp.stack([made[k][1]] * layers) for k in ("w_fn", "base", "scale", "gain")}
    arrays = {"streams": made["streams"]} | stacks
    fixed = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}

    def run(tile, arrays, i):
        return hyper.hyper_enter_pallas(
            **arrays, layer=i % layers, **fixed, dispatch=dispatch, tile=tile
        )

    def reference(arrays, i):
        return hyper_op.hyper_enter_reference(**arrays, layer=i % layers, **fixed)

    def check() -> float:
        outs = jax.jit(partial(run, None))(arrays, jnp.int32(1))
        expected = jax.jit(reference)(arrays, jnp.int32(1))
        return max(relative_error(a, b) for a, b in zip(outs, expected))

    default = hyper.default_tile(tokens=tokens, inner=4 * model, capability=dispatch.capability)
    variants = {}
    # More tokens per tile read the projection's weights less often, and need more splits to fill the device.
    tiles = [
        hyper.Tile(block, depth, splits, warps, stages, mix_warps)
        for block, depth, splits, warps, stages, mix_warps in itertools.product(
            (16, 32, 64, 128),
            (64, 128, 256),
            (1, 2, 4, 8, 16, 32),
            (2, 4, 8),
            (2, 3, 4),
            (1, 2, 4, 8),
        )
        if 4 * model % (depth * splits) == 0
        and splits * -(-tokens // block) >= 64
        and splits * tokens <= 16384
    ]
    for tile in _nearest(tiles, default, most=3):
        variants[label(tile)] = partial(run, tile)
    return Problem(
        kernel="hyper_enter",
        case=f"{tokens}x4x{model}",
        arguments=arrays,
        run=partial(run, None),
        check=check,
        num_bytes=2.0 * tokens * 5 * model + 24 * 4 * 4.0 * model,
        flops=2.0 * tokens * 24 * 4 * model,
        expected_ms=max(0.01, tokens * 5e-5),
        tile=default,
        variants=variants,
        peers={"XLA": lambda: time_ms(reference, arrays, 0.1)},
    )


def _hyper_leave(tokens: int, model: int, dispatch: Dispatch) -> Problem:
    case = hyper_cases.Case("", tokens, model)
    made = hyper_cases.make(case, 8, jnp.bfloat16)
    mixed = hyper_op.hyper_enter_reference(**made)
    arrays = (
        made["streams"],
        hyper_cases.make_output(case, 8, jnp.bfloat16),
        jnp.stack([mixed[1]] * 2),
        jnp.stack([mixed[2]] * 2),
    )

    def run(call, arrays, i):
        streams, output, post, comb = arrays
        return call(streams, output, post[i % 2], comb[i % 2])

    kernel = partial(run, partial(hyper.hyper_leave_pallas, dispatch=dispatch))
    reference = partial(run, hyper_op.hyper_leave_reference)

    def check() -> float:
        return relative_error(
            jax.jit(kernel)(arrays, jnp.int32(0)), jax.jit(reference)(arrays, jnp.int32(0))
        )

    return Problem(
        kernel="hyper_leave",
        case=f"{tokens}x4x{model}",
        arguments=arrays,
        run=kernel,
        check=check,
        num_bytes=2.0 * tokens * 9 * model,
        flops=2.0 * tokens * 20 * model,
        expected_ms=max(0.01, tokens * 5e-5),
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )


def compress_problems(dispatch: Dispatch) -> Iterator[Callable[[], Problem]]:
    """Closing windows of decode steps."""
    for name, size in (("csa", compress_cases.CSA), ("hca", compress_cases.HCA)):
        for tokens in (64, 1024):
            yield partial(_compress, name, compress_cases.decode_case(tokens, **size), dispatch)


def _compress(name: str, case: compress_cases.Case, dispatch: Dispatch) -> Problem:
    made = compress_cases.make(case, 9)
    layers = 4
    fixed = {"ratio": case.ratio, "overlap": case.overlap}
    arrays = {k: v for k, v in made.items() if k not in fixed and k != "layer"}
    arrays["open_rows"] = jnp.stack([made["open_rows"][1]] * layers)

    def run(arrays, i, dispatch=dispatch):
        return compress_op.compress(**arrays, layer=i % layers, **fixed, dispatch=dispatch)

    reference = partial(run, dispatch=Dispatch())
    used = np.asarray(made["closing"]) < made["step_rows"].shape[0]

    def check() -> float:
        out, expected = (jax.jit(f)(arrays, jnp.int32(1)) for f in (run, reference))
        return relative_error(np.asarray(out)[used], np.asarray(expected)[used])

    span = case.ratio * (2 if case.overlap else 1)
    return Problem(
        kernel="compress",
        case=f"{name} {case.name}, {used.sum()} close",
        arguments=arrays,
        run=run,
        check=check,
        num_bytes=8.0 * case.width * span * int(used.sum()),
        flops=0.0,
        expected_ms=0.01,
        limit=1e-4,
        peers={"XLA": lambda: time_ms(reference, arrays, 0.05)},
    )


PROBLEMS: dict[str, Callable[[Dispatch], Iterator[Callable[[], Problem]]]] = {
    "sparse_mla": sparse_mla_problems,
    "index_topk": index_topk_problems,
    "expert_plan": plan_problems,
    "expert_mlp": expert_problems,
    "linear": linear_problems,
    "hyper": hyper_problems,
    "compress": compress_problems,
    "allocate": allocate_problems,
}
