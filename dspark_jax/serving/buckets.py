"""Token buckets: the shapes a step is compiled for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Literal

from dspark_jax.serving.flag_error import FlagError

Ladder = Literal["default", "doubling", "vllm"]

# Steps of an eighth to a quarter of the size: a compilation costs minutes at full size, padding a few per cent.
_STRIDES = ((8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048))
_VLLM_STRIDES = ((8, 248), (16, 1024))
# Where few programs are wanted, drafting for more requests than this takes several calls: on a CPU a call of 32
# rows takes about as long as two of 16.
_DOUBLING_ROWS = 16


def default_ladder(max_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, multiples of 8 to 64, of 16 to 128 and so on to 2048, then doublings, up to `max_tokens`."""
    return _ladder(_STRIDES, max_tokens)


def doubling_ladder(max_tokens: int) -> tuple[int, ...]:
    """1, 4 and doublings up to `max_tokens`: few programs, for hosts where compiling costs more than padding.

    On a CPU a step of two tokens takes nearly as long as one of four.
    """
    return tuple(size for size in _ladder((), max_tokens) if size != 2 or max_tokens == 2)


def vllm_ladder(max_tokens: int) -> tuple[int, ...]:
    """vLLM's capture sizes, 1, 2, 4, 8..248 by 8, 256..1024 by 16, then doublings, up to `max_tokens`."""
    return _ladder(_VLLM_STRIDES, max_tokens)


def _ladder(strides: Sequence[tuple[int, int]], max_tokens: int) -> tuple[int, ...]:
    sizes = [1, 2, 4]
    for stride, last in strides:
        first = sizes[-1] // stride * stride + stride
        sizes.extend(range(first, last + 1, stride))
    while sizes[-1] < max_tokens:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < max_tokens), max_tokens)


_LADDERS = {"default": default_ladder, "doubling": doubling_ladder, "vllm": vllm_ladder}


def row_buckets(
    max_num_seqs: int, ladder: Ladder = "default", sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Request counts that the drafting half is compiled for, increasing.

    The last one is `max_num_seqs`, or less in the ladder `doubling`: more requests take several calls. `sizes`
    takes the place of the ladder.
    """
    if sizes is not None:
        return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
    most = min(max_num_seqs, _DOUBLING_ROWS) if ladder == "doubling" else max_num_seqs
    return _LADDERS[ladder](most)


def token_buckets(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    draft_len: int,
    ladder: Ladder = "default",
    max_capture_tokens: int | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The buckets of a server, increasing; the last one is `max_num_batched_tokens`.

    Up to `max_capture_tokens`, by default `(draft_len + 1) * max_num_seqs`, which is every step of decoding
    requests, the ladder is fine; above it only doublings are compiled. `draft_len` is 0 without a drafter.
    `sizes`, increasing, take the place of the ladder and of its limit.

    Raises `FlagError` when one request with its whole draft, or one token of every request, fits no bucket.
    """
    if max_num_batched_tokens <= draft_len:
        raise FlagError(
            f"one request verifies up to {draft_len + 1} tokens and no step holds them: "
            f"raise --max-num-batched-tokens {max_num_batched_tokens} to at least {draft_len + 1}"
        )
    if max_num_batched_tokens < max_num_seqs:
        raise FlagError(
            f"--max-num-batched-tokens {max_num_batched_tokens} is less than one token for each of "
            f"--max-num-seqs {max_num_seqs}: raise the one or lower the other"
        )
    if sizes is not None:
        max_capture_tokens = sizes[-1]
    if max_capture_tokens is None:
        max_capture_tokens = (draft_len + 1) * max_num_seqs
    if max_capture_tokens <= draft_len:
        raise FlagError(
            f"--max-capture-tokens {max_capture_tokens} does not hold one request's draft: "
            f"raise it to at least {draft_len + 1}"
        )
    fine_limit = min(max_capture_tokens, max_num_batched_tokens)
    if sizes is not None:
        buckets = [size for size in sizes if size <= fine_limit]
    else:
        buckets = list(_LADDERS[ladder](fine_limit))
    while 2 * buckets[-1] < max_num_batched_tokens:
        buckets.append(2 * buckets[-1])
    if buckets[-1] < max_num_batched_tokens:
        buckets.append(max_num_batched_tokens)
    return tuple(buckets)


def bucket_for(buckets: Sequence[int], num_tokens: int) -> int:
    """The smallest of the increasing `buckets` that holds `num_tokens`.

    Raises ValueError when none does, which is an error of the scheduler.
    """
    index = bisect.bisect_left(buckets, num_tokens)
    if index == len(buckets):
        raise ValueError(f"a step of {num_tokens} tokens exceeds the largest bucket, {buckets[-1]}")
    return buckets[index]
