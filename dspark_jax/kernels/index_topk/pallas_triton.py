"""Triton kernels of `index_topk`: scores in float32, then a selection by bisection.

Scores. Tokens of one request share its keys, so runs of at most `ScoreTile.tokens` neighbours with the same slot
form a tile; a program scores one block of keys for one tile. Keys are the row operand: the sum over heads then
stays within a thread. A token that sees at most k entries keeps them all and is not scored. Keys in fp8 become
float16, or float32 beside float32 queries, and the scale of a key multiplies its sum.

Selection. One program finds a row's k-th largest score by bisection over the integers that order like floats, then
compacts what lies above it and the first of what equals it. Rows longer than `MOST` are cut into chunks whose
winners compete once more. Scores are never larger than `BUDGET_BYTES`: more tokens take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.order import ordered_bits
from dspark_jax.kernels.row_tile import tile_dtype
from dspark_jax.kernels.rows import Fp8Keys, Keys
from dspark_jax.kernels.triton import dot, gather, loop, scatter, triton_call

BUDGET_BYTES = 256 * 2**20
MOST = 32768
_LOWEST = -(2**31)


@dataclass(frozen=True)
class ScoreTile:
    """Tokens and keys of one program, and its launch."""

    tokens: int
    keys: int
    warps: int
    stages: int


def default_score_tile(*, key_bytes: int, capability: int) -> ScoreTile:
    """Tile for keys of `key_bytes` bytes per channel, or 4 where they become float32.

    Measured on H200 with 64 heads of 128 channels. SM100 and SM103 start from the same sizes.
    """
    del capability
    if key_bytes == 1:
        return ScoreTile(tokens=8, keys=128, warps=4, stages=2)
    return ScoreTile(tokens=4, keys=256 if key_bytes == 2 else 64, warps=8, stages=2)


def index_topk_pallas(
    q,
    head_weights,
    index_keys,
    *,
    layer,
    page_table,
    slots,
    counts,
    k,
    tiles: jax.Array | None = None,
    dispatch: Dispatch,
    tile: ScoreTile | None = None,
    most: int = MOST,
    budget_bytes: int = BUDGET_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """See `index_topk`; `tile`, `most` and `budget_bytes` override the default sizes.

    `tiles` are those of the default tile and budget.
    """
    tokens = q.shape[0]
    entries = page_table.shape[1] * index_keys.shape[2]
    k = min(k, entries)
    tile = tile or _default_tile(index_keys, q.dtype, dispatch)
    tables = jnp.maximum(page_table, 0)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)

    def choose(part, tiles=None):
        q, head_weights, slots, counts = part
        if tiles is None:
            tiles = tile_begins(slots, size=tile.tokens, requests=page_table.shape[0])
        scores = score(
            tiles,
            q,
            head_weights,
            index_keys,
            layer=layer,
            page_table=tables,
            slots=slots,
            counts=counts,
            k=k,
            dispatch=dispatch,
            tile=tile,
        )
        return select(
            scores,
            counts,
            k=k,
            page_table=tables,
            slots=slots,
            per_page=index_keys.shape[2],
            dispatch=dispatch,
            most=most,
        )

    turn = _turn(entries, budget_bytes)
    arguments = (q, head_weights, slots, counts)
    if tokens <= turn:
        places = choose(arguments, tiles)
    else:
        turns = pl.cdiv(tokens, turn)
        padded = jax.tree.map(
            lambda x: jnp.pad(x, [(0, turns * turn - tokens)] + [(0, 0)] * (x.ndim - 1)), arguments
        )
        cut = jax.tree.map(lambda x: x.reshape(turns, turn, *x.shape[1:]), padded)
        places = lax.map(choose, cut).reshape(turns * turn, k)[:tokens]
    return places, jnp.minimum(counts, k)


def shared_tiles(
    slots: jax.Array, index_keys: Keys, page_table: jax.Array, *, dtype: Any, dispatch: Dispatch
) -> jax.Array | None:
    """See `query_tiles`."""
    if slots.shape[0] > _turn(page_table.shape[1] * index_keys.shape[2], BUDGET_BYTES):
        return None
    size = _default_tile(index_keys, dtype, dispatch).tokens
    return tile_begins(slots, size=size, requests=page_table.shape[0])


def _default_tile(index_keys: Keys, dtype: Any, dispatch: Dispatch) -> ScoreTile:
    return default_score_tile(
        key_bytes=_key_bytes(index_keys, dtype), capability=dispatch.capability
    )


def _turn(entries: int, budget_bytes: int) -> int:
    """Tokens whose scores of `entries` entries fit the budget."""
    return max(1, budget_bytes // (4 * entries))


def tile_begins(slots: jax.Array, *, size: int, requests: int) -> jax.Array:
    """First token of every tile, int32 [tiles + 1], T where unused: runs of at most `size` with the same slot.

    A tile begins where the slot changes and every `size` tokens after that. There are at most `requests` + 1 runs.
    """
    tokens = slots.shape[0]
    number = jnp.arange(tokens)
    changes = jnp.concatenate([jnp.ones(1, bool), slots[1:] != slots[:-1]])
    run = lax.cummax(jnp.where(changes, number, 0))
    begins_tile = (number - run) % size == 0
    tiles = min(tokens, tokens // size + requests + 1)
    return jnp.nonzero(begins_tile, size=tiles + 1, fill_value=tokens)[0].astype(jnp.int32)


def score(
    begins, q, head_weights, index_keys, *, layer, page_table, slots, counts, k, dispatch, tile
) -> jax.Array:
    """float32 [T, max_pages * S]: sum_i weight_i * relu(q_i . key_w) below each token's count, rubbish beyond.

    Rows of tokens with a count of at most k are rubbish. `begins` are from `tile_begins`, `layer` is int32 [1],
    `page_table` has no negatives.
    """
    tokens = q.shape[0]
    entries = page_table.shape[1] * index_keys.shape[2]
    keys = min(tile.keys, max(16, pl.next_power_of_2(entries)))
    return triton_call(
        partial(_score, keys=keys, k=k),
        begins,
        layer,
        q.astype(tile_dtype(index_keys, q.dtype)),
        head_weights,
        index_keys,
        page_table,
        slots,
        counts,
        grid=(pl.cdiv(entries, keys), begins.shape[0] - 1),
        out_shape=jax.ShapeDtypeStruct((tokens, entries), jnp.float32),
        name="index_scores",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _key_bytes(index_keys: Keys, queries: Any) -> int:
    """What `default_score_tile` goes by."""
    is_wide = tile_dtype(index_keys, queries) == jnp.float32
    return 4 if is_wide else _codes(index_keys).dtype.itemsize


def _codes(index_keys: Any) -> Any:
    """The array of keys, without their scales, or a ref of it."""
    return index_keys.codes if isinstance(index_keys, Fp8Keys) else index_keys


def select(scores, counts, *, k, page_table, slots, per_page, dispatch, most=MOST) -> jax.Array:
    """Places int32 [T, k] of the k highest among the first `counts` scores of a row, lowest index first."""
    tokens, entries = scores.shape
    chunks = pl.cdiv(entries, most)
    numbers = None
    if chunks > 1:
        shape = (tokens, chunks * k)
        scores, numbers = triton_call(
            partial(_select_chunk, k=k, size=most),
            scores,
            counts,
            grid=(chunks, tokens),
            out_shape=(
                jax.ShapeDtypeStruct(shape, jnp.float32),
                jax.ShapeDtypeStruct(shape, jnp.int32),
            ),
            name="index_select_chunk",
            dispatch=dispatch,
            num_warps=16,
        )
        entries = chunks * k
    return triton_call(
        partial(_select_row, k=k, per_page=per_page, chunked=numbers is not None),
        scores,
        *(() if numbers is None else (numbers,)),
        counts,
        page_table,
        slots,
        grid=(tokens,),
        out_shape=jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        name="index_select",
        dispatch=dispatch,
        num_warps=4 if entries <= 2048 else 8 if entries <= 8192 else 16,
    )


def _score(
    begins: Any,
    layer: Any,
    q: Any,
    head_weights: Any,
    index_keys: Any,
    page_table: Any,
    slots: Any,
    counts: Any,
    scores: Any,
    *,
    keys: int,
    k: int,
) -> None:
    """Body: one block of keys, one tile of tokens.

    begins [tiles + 1]; layer [1]; q [T, Hi, I]; head_weights [T, Hi]; index_keys [L, P, S, I] or `Fp8Keys`;
    page_table [slots, max_pages]; slots and counts [T]; out scores [T, N].
    """
    tile = pl.program_id(1)
    first_key = pl.program_id(0) * keys
    begin, end = begins[tile], begins[tile + 1]
    tokens, heads, width = q.shape
    per_page = index_keys.shape[2]

    def longest(t, most):
        count = counts[t]
        return jnp.maximum(most, jnp.where(count > k, count, 0))

    reach = loop(begin, end, longest, jnp.int32(0))

    @pl.when(first_key < reach)
    def _():
        entry = first_key + jnp.arange(keys)
        visible = entry < reach
        slot = slots[jnp.minimum(begin, tokens - 1)]
        page = gather(page_table, slot, entry // per_page, mask=visible)
        channel = jnp.arange(width)
        head = jnp.arange(pl.next_power_of_2(heads))
        is_head = head < heads
        place = (layer[0], page[:, None], (entry % per_page)[:, None], channel[None])
        rows = gather(_codes(index_keys), *place, mask=visible[:, None]).astype(q.dtype)
        scale = None
        if isinstance(index_keys, Fp8Keys):
            scale = gather(index_keys.scale, layer[0], page, entry % per_page, mask=visible)

        def one(t, carry):
            query = gather(q, t, head[:, None], channel[None], mask=is_head[:, None])
            weight = gather(head_weights, t, head, mask=is_head)
            dots = jnp.maximum(dot(rows, query, transpose_b=True), 0.0)
            total = jnp.sum(dots * weight[None], axis=1)
            if scale is not None:
                total *= scale
            scatter(scores, t, entry, value=total, mask=entry < counts[t])
            return carry

        loop(begin, end, one, jnp.int32(0))


def _select_chunk(scores: Any, counts: Any, out: Any, numbers: Any, *, k: int, size: int) -> None:
    """Body: the k best of one chunk. scores [T, N], counts [T] -> out, numbers [T, chunks * k].

    Places that a short chunk leaves empty get the lowest score.
    """
    chunk, token = pl.program_id(0), pl.program_id(1)
    index = chunk * size + jnp.arange(size)
    valid = index < jnp.minimum(counts[token], scores.shape[1])
    score = gather(scores, token, index, mask=valid)
    rank, chosen, found = _rank(score, valid, k)
    place = jnp.where(chosen, chunk * k + rank, out.shape[1])
    scatter(out, token, place, value=score, mask=chosen)
    scatter(numbers, token, place, value=index, mask=chosen)
    lane = jnp.arange(pl.next_power_of_2(k))
    empty = (lane >= found) & (lane < k)
    place = jnp.where(empty, chunk * k + lane, out.shape[1])
    scatter(out, token, place, value=jnp.full(lane.shape, -jnp.inf), mask=empty)
    scatter(numbers, token, place, value=jnp.zeros(lane.shape, jnp.int32), mask=empty)


def _select_row(scores: Any, *refs: Any, k: int, per_page: int, chunked: bool) -> None:
    """Body: one row. scores [T, N], numbers [T, N] if chunked, counts [T], page_table, slots [T] -> places [T, k].

    A row's work follows its count, not the width of the array: it runs at the first size that holds it.
    """
    *numbers, counts, page_table, slots, places = refs
    token = pl.program_id(0)
    entries = scores.shape[1]
    count = counts[token]
    slot = slots[token]
    full = pl.next_power_of_2(entries)
    sizes = [full] if chunked else [s for s in (1024, 4096, 16384) if s < full] + [full]

    def run(size: int) -> None:
        index = jnp.arange(size)
        valid = index < entries
        if not chunked:
            valid = valid & (index < count)
        score = gather(scores, token, index, mask=valid & (count > k))
        rank, chosen, _ = _rank(score, valid, jnp.minimum(count, k))
        number = gather(numbers[0], token, index, mask=chosen) if chunked else index
        page = gather(page_table, slot, number // per_page, mask=chosen)
        place = page * per_page + number % per_page
        scatter(places, token, jnp.where(chosen, rank, k), value=place, mask=chosen)

    for below, size in zip([-1, *sizes], sizes):
        last = size == sizes[-1]

        @pl.when((count > below) if last else (count > below) & (count <= size))
        def _(size=size):
            run(size)

    lane = jnp.arange(pl.next_power_of_2(k))
    empty = (lane >= jnp.minimum(count, k)) & (lane < k)
    zero = jnp.zeros(lane.shape, jnp.int32)
    scatter(places, token, jnp.where(empty, lane, k), value=zero, mask=empty)


def _rank(
    score: jax.Array, valid: jax.Array, want: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `want` highest valid of score [n]: rank among the chosen by index, which are chosen, how many.

    All valid ones are chosen if there are no more than `want`.
    """
    order = jnp.where(valid, ordered_bits(score), _LOWEST)
    want = jnp.minimum(want, jnp.sum(valid.astype(jnp.int32)))

    def at_least(bound):
        return jnp.sum((order >= bound).astype(jnp.int32))

    def unfinished(carry):
        low, high, reached = carry
        return (low < high) & (reached != want)

    def halve(carry):
        low, high, reached = carry
        middle = (low | high) - ((low ^ high) >> 1)  # upper mean without overflow
        count = at_least(middle)
        enough = count >= want
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle - 1),
            jnp.where(enough, count, reached),
        )

    # Invariant: at least `want` lie at or above `low`, fewer above `high`.
    low = jnp.min(jnp.where(valid, order, 0x7FFFFFFF))
    high = jnp.max(order)
    bound, _, _ = lax.while_loop(unfinished, halve, (low, high, at_least(low)))
    above = valid & (order > bound)
    equal = valid & (order == bound)
    # One scan counts both: ties in the upper half of the word, which holds 32768 of them.
    both = jnp.cumsum(above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16))
    num_above, num_equal = both & 0xFFFF, lax.shift_right_logical(both, 16)
    spare = want - jnp.sum(above.astype(jnp.int32))
    chosen = above | (equal & (num_equal <= spare))
    return num_above + jnp.minimum(num_equal, spare) - 1, chosen, want
