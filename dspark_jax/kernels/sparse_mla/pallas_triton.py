"""Triton kernels of `sparse_mla`.

One program attends with a block of heads of one token. Heads run on the fastest grid axis, so that the programs of
a token read its rows at about the same time. Few tokens leave multiprocessors idle: then the rows of a token are
split over programs, and a second kernel merges the parts by their log-sum-exp.

Each of the three sources is a list of places per token and a count; the lists are cut into tiles, and a program
takes a run of them. The places of the window could be computed here, but a place that is loaded keeps the compiler
from buffering more row tiles than fit shared memory. Scores are kept in base two.

Queries are normed and rotated once per program, ahead of its rows, or by a kernel of their own: wgmma, which
multiplies 64 plain rows, reads its left side in shared memory only if the compiler sees it loaded. What was
computed is copied to registers before every product, which costs more than a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.row_tile import Part, load_parts, row_parts, tile_dtype, whole_part
from dspark_jax.kernels.rows import Fp8Rows, by_place, plain_values
from dspark_jax.kernels.sparse_mla.window import WindowLists, window_lists
from dspark_jax.kernels.triton import (
    LOG2_E,
    MASKED,
    computed_once,
    dot,
    gather,
    loop,
    multiprocessors,
    row_block,
    scatter,
    triton_call,
)

ROW_HEADS = 4
"""Heads of one program of the kernels before and after."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one launch: `heads` by `keys` (`step_keys` in the step's rows), plain rows in `part`-wide pieces.

    fp8 rows are cut into their blocks.
    """

    heads: int
    keys: int
    step_keys: int
    part: int
    splits: int
    warps: int
    stages: int


def default_tile(
    *,
    tokens: int,
    heads: int,
    width: int,
    rows: int,
    itemsize: int,
    capability: int,
    is_fp8: bool = False,
) -> Tile:
    """Tile for `tokens` tokens with at most `rows` rows each of `width` channels.

    `itemsize` is that of a channel in a product. Measured on H200 with 64 heads of 512 channels and 640 rows. A
    tile of 64 heads and 8 warps fills a multiprocessor; with 32 heads two programs share one, which wins once
    there are enough of them, but not for rows in fp8: both would decode them. Those are fetched ahead from 5
    stages on, which pays from 64 tokens. SM100 and SM103 start from the same sizes, which were not measured there;
    they keep queries in shared memory too, so row tiles beside 64 heads must be half as long, and sums in tensor
    memory, which those of fp8 rows, eight parts, overflow for 64 heads.
    """
    sms = multiprocessors(capability)
    wide = itemsize > 2  # float32 operands: a quarter of the tile, to fit shared memory
    keys = 16 if wide else 64
    # A decoding request has at most a few rows in its own step, a prompt chunk a whole window of them.
    step_keys = min(keys, 16 if tokens < 256 else 32)
    if not wide and (capability >= 100 if is_fp8 else tokens >= 256):
        block, warps, stages = row_block(heads, 32), 4, 3
    else:
        block, warps, stages = row_block(heads, 16 if wide else 64), 8, 3
        keys = min(keys, 64 if capability < 100 else 32)
    if is_fp8 and not wide:
        stages = 1 if tokens < 64 else 5
    programs = tokens * pl.cdiv(heads, block)
    # Each split has a tile at least, one more than there are because the step's rows begin their own.
    splits = max(1, min(32, pl.cdiv(rows, keys) + 1, sms // programs))
    return Tile(
        heads=block,
        keys=keys,
        step_keys=step_keys,
        part=width,
        splits=splits,
        warps=warps if width >= 256 else 4,
        stages=stages,
    )


def sparse_mla_pallas(
    q,
    window,
    step_rows,
    entries,
    *,
    layer,
    entry_layer,
    attn_sink,
    slots,
    positions,
    starts,
    row_heads,
    is_token,
    entry_places,
    entry_counts,
    norm_eps,
    lists: WindowLists | None = None,
    rotation=None,
    dispatch: Dispatch,
    tile: Tile | None = None,
) -> jax.Array:
    """See `sparse_mla` for arguments and result; `tile` overrides the default sizes."""
    tokens, heads, width = q.shape
    length = window.shape[2]
    window, entries = plain_values(window), plain_values(entries)
    is_fp8 = isinstance(window, Fp8Rows)
    if not is_fp8 and (width & (width - 1) or width < 16):
        raise ValueError(f"sparse_mla: row width {width} is not a power of two of at least 16")
    dtype = tile_dtype(window, q.dtype)
    listed = 0 if entries is None else entry_places.shape[1]
    tile = tile or default_tile(
        tokens=tokens,
        heads=heads,
        width=width,
        rows=length + listed,
        itemsize=jnp.dtype(dtype).itemsize,
        capability=dispatch.capability,
        is_fp8=is_fp8,
    )
    parts = row_parts(window, tile.part)
    lists = lists or window_lists(
        positions=positions,
        starts=starts,
        row_heads=row_heads,
        is_token=is_token,
        length=length,
    )
    refs = {
        "layers": jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(entry_layer, jnp.int32)]),
        "slots": slots,
        "q": q,
        "sink": attn_sink,
        "ring": window,
        "ring_places": lists.ring_places,
        "ring_counts": lists.ring_counts,
        "step": step_rows,
        "step_places": lists.step_places,
        "step_counts": lists.step_counts,
    }
    if listed:
        refs["listed"] = by_place(entries)
        refs["listed_places"] = entry_places
        refs["listed_counts"] = jnp.where(is_token, entry_counts, 0)
    angles = {} if rotation is None else dict(zip(("cos", "sin"), rotation))
    whole = jax.ShapeDtypeStruct(q.shape, q.dtype)
    half = jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    split_out = (
        jax.ShapeDtypeStruct((tile.splits, *q.shape), half),
        jax.ShapeDtypeStruct((tile.splits, tokens, heads), jnp.float32),
    )

    if norm_eps is not None and tile.heads >= 64 and not is_fp8:
        (q,) = _call(
            partial(_write_queries, norm_eps=norm_eps),
            {"q": q, **angles},
            grid=(pl.cdiv(heads, ROW_HEADS), tokens),
            out_shape=(whole,),
            name="sparse_mla_queries",
            dispatch=dispatch,
            num_warps=4,
        )
        refs["q"], norm_eps = q, None
    out = _call(
        partial(_attend, tile=tile, parts=parts, dtype=dtype, norm_eps=norm_eps),
        refs | angles,
        grid=(pl.cdiv(heads, tile.heads), tokens, tile.splits),
        out_shape=(whole,) if tile.splits == 1 else split_out,
        name="sparse_mla",
        dispatch=dispatch,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        partial_out, lse = out
        out = _call(
            partial(_merge, splits=tile.splits),
            {"partial": partial_out, "lse": lse, **angles},
            grid=(pl.cdiv(heads, ROW_HEADS), tokens),
            out_shape=(whole,),
            name="sparse_mla_merge",
            dispatch=dispatch,
            num_warps=4,
        )
    return out[0]


def _call(body, refs: Mapping[str, Any], **options: Any) -> Any:
    """`triton_call` of `body(refs, outs)` with inputs by name, some of which may be trees of arrays."""
    names = tuple(refs)

    def kernel(*args):
        body(dict(zip(names, args)), args[len(names) :])

    return triton_call(kernel, *refs.values(), **options)


def _attend(
    refs: dict[str, Any],
    outs: tuple[Any, ...],
    *,
    tile: Tile,
    parts: tuple[Part, ...],
    dtype: Any,
    norm_eps: float | None,
) -> None:
    """Body: one block of heads, one token, one run of tiles; rows and queries meet in `dtype`.

    Refs: q [T, H, D], ready if `norm_eps` is None; sink [H]; layers [2]; slots [T]; ring [L, slots, W, D],
    step [T, D], listed [L_e, P*S, D], each with places [T, K] and counts [T], ring and listed perhaps `Fp8Rows`;
    cos and sin [T, R/2]. `outs` is out [T, H, D], or partial [splits, T, H, D], not rotated back, and
    lse [splits, T, H].
    """
    token, split = pl.program_id(1), pl.program_id(2)
    heads, width = refs["q"].shape[1:]
    head = pl.program_id(0) * tile.heads + jnp.arange(tile.heads)
    is_head = head < heads
    if norm_eps is None:
        q = load_parts(refs["q"], (token,), head, is_head, parts, dtype)
    else:
        ready = partial(_queries, refs, token, head, parts, dtype=dtype, norm_eps=norm_eps)
        like = [jax.ShapeDtypeStruct((tile.heads, part.size), dtype) for part in parts]
        q = computed_once(ready, like, token)
    sources: list[tuple[str, tuple[Any, ...], int]] = [
        ("ring", (refs["layers"][0], refs["slots"][token]), tile.keys),
        ("step", (), tile.step_keys),
    ]
    if "listed" in refs:
        sources.append(("listed", (refs["layers"][1],), tile.keys))
    counts = [refs[f"{name}_counts"][token] for name, _, _ in sources]
    tiles = [pl.cdiv(count, keys) for count, (_, _, keys) in zip(counts, sources)]
    begin = sum(tiles) * split // tile.splits
    end = sum(tiles) * (split + 1) // tile.splits

    def absorb(name, lead, keys, count, i, carry):
        top, total, sums = carry
        key = i * keys + jnp.arange(keys)
        valid = key < count
        # Beyond the count the last row again: cheaper than a mask on every row, and finite: a score hides it.
        place = gather(refs[f"{name}_places"], token, jnp.minimum(key, count - 1), mask=None)
        rows = load_parts(refs[name], lead, place, None, parts, dtype)
        logits = sum(dot(a, b, transpose_b=True) for a, b in zip(q, rows))
        logits = jnp.where(valid[None], logits * (LOG2_E * width**-0.5), MASKED)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - higher[:, None])
        fade = jnp.exp2(top - higher)
        total = total * fade + jnp.sum(weights, axis=1)
        weights = weights.astype(dtype)
        sums = tuple(s * fade[:, None] + dot(weights, r) for s, r in zip(sums, rows))
        return higher, total, sums

    # The sink is a score without a value: the first split starts from it, so no sum is ever empty there.
    sink = gather(refs["sink"], head, mask=is_head) * LOG2_E
    own_sink = split == 0
    carry = (
        jnp.where(own_sink, sink, MASKED),
        jnp.where(own_sink, jnp.ones(tile.heads, jnp.float32), 0.0),
        tuple(jnp.zeros((tile.heads, part.size), jnp.float32) for part in parts),
    )
    before = 0
    for (name, lead, keys), count, number in zip(sources, counts, tiles):
        carry = loop(
            jnp.clip(begin - before, 0, number),
            jnp.clip(end - before, 0, number),
            partial(absorb, name, lead, keys, count),
            carry,
        )
        before = before + number
    top, total, sums = carry

    scale = 1.0 / jnp.where(total > 0, total, 1.0)
    out, *lse = outs
    lead = (split,) if lse else ()
    for part, s in zip(parts, sums):
        value = s * scale[:, None]
        if not lse:
            value = _rotate(value, refs, token, part, width, inverse=True)
        place = (*lead, token, head[:, None], part.channels[None])
        scatter(out, *place, value=value, mask=part.mask(is_head))
    if lse:
        level = jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), MASKED)
        scatter(lse[0], split, token, head, value=level, mask=is_head)


def _merge(refs: dict[str, Any], outs: tuple[Any, ...], *, splits: int) -> None:
    """Body: ROW_HEADS heads of one token. partial [splits, T, H, D], lse [splits, T, H], out [T, H, D]."""
    (out,) = outs
    token = pl.program_id(1)
    heads, width = out.shape[1:]
    head = pl.program_id(0) * ROW_HEADS + jnp.arange(ROW_HEADS)
    is_head = head < heads
    whole = whole_part(0, width)
    levels = [gather(refs["lse"], s, token, head, mask=is_head) for s in range(splits)]
    top = levels[0]
    for level in levels[1:]:
        top = jnp.maximum(top, level)
    total = jnp.zeros(ROW_HEADS, jnp.float32)
    value = jnp.zeros((ROW_HEADS, whole.size), jnp.float32)
    for s, level in enumerate(levels):
        weight = jnp.exp2(level - top)
        (part,) = load_parts(refs["partial"], (s, token), head, is_head, (whole,), jnp.float32)
        total += weight
        value += weight[:, None] * part
    value = _rotate(value / total[:, None], refs, token, whole, width, inverse=True)
    place = (token, head[:, None], whole.channels[None])
    scatter(out, *place, value=value, mask=whole.mask(is_head))


def _write_queries(refs: dict[str, Any], outs: tuple[Any, ...], *, norm_eps: float) -> None:
    """Body: ROW_HEADS heads of one token as they meet the rows. q and out [T, H, D], cos and sin [T, R/2]."""
    (out,) = outs
    token, (heads, width) = pl.program_id(1), out.shape[1:]
    head = pl.program_id(0) * ROW_HEADS + jnp.arange(ROW_HEADS)
    whole = whole_part(0, width)
    (value,) = _queries(refs, token, head, (whole,), dtype=out.dtype, norm_eps=norm_eps)
    place = (token, head[:, None], whole.channels[None])
    scatter(out, *place, value=value, mask=whole.mask(head < heads))


def _queries(
    refs: dict[str, Any],
    token: jax.Array,
    head: jax.Array,
    parts: tuple[Part, ...],
    *,
    dtype: Any,
    norm_eps: float,
) -> list[jax.Array]:
    """Heads of a token by parts [heads, size] in `dtype`: normed and rotated, 0 where there is no head."""
    heads, width = refs["q"].shape[1:]
    is_head = head < heads
    raw = load_parts(refs["q"], (token,), head, is_head, parts, refs["q"].dtype)
    squares = sum(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in raw)
    factor = lax.rsqrt(squares / width + norm_eps)[:, None]
    turned = (
        _rotate(x.astype(jnp.float32), refs, token, part, width) for x, part in zip(raw, parts)
    )
    return [(x * factor).astype(dtype) for x in turned]


def _rotate(
    value: jax.Array,
    refs: dict[str, Any],
    token: jax.Array,
    part: Part,
    width: int,
    *,
    inverse: bool = False,
) -> jax.Array:
    """Turn the rotary channels in float32 value [heads, size], which are `part` of `width`, or turn them back.

    cos and sin are [T, R/2]; without them nothing is turned. Channels before the last R have angle zero.
    """
    if "cos" not in refs:
        return value
    first, count, size = part
    rotary = 2 * refs["cos"].shape[1]
    if first + count <= width - rotary:
        return value
    pair = (first - (width - rotary)) // 2 + jnp.arange(size // 2)
    inside = pair >= 0
    if first + size > width:
        inside &= pair < rotary // 2
    cos = jnp.where(inside, gather(refs["cos"], token, pair, mask=inside), 1.0)
    sin = gather(refs["sin"], token, pair, mask=inside)
    sin = -sin if inverse else sin
    even, odd = lax.split(value.reshape(-1, size // 2, 2), (1, 1), axis=2)
    even, odd = even.reshape(-1, size // 2), odd.reshape(-1, size // 2)
    turned = (even * cos - odd * sin)[..., None], (odd * cos + even * sin)[..., None]
    return lax.concatenate(turned, dimension=2).reshape(-1, size)
