"""Ladders, the capture limit, and bucket sets that are refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.serving.buckets import (
    bucket_for,
    default_ladder,
    row_buckets,
    token_buckets,
    vllm_ladder,
)
from dspark_jax.serving.flag_error import FlagError


def test_default_ladder_to_2048() -> None:
    assert default_ladder(2048) == (
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64),
        *(80, 96, 112, 128),
        *(160, 192, 224, 256),
        *(320, 384, 448, 512),
        *(640, 768, 896, 1024),
        *(1280, 1536, 1792, 2048),
    )


def test_vllm_ladder_has_its_83_sizes() -> None:
    ladder = vllm_ladder(1024)
    assert len(ladder) == 83
    assert ladder == (1, 2, 4, *range(8, 249, 8), *range(256, 1025, 16))


@pytest.mark.parametrize("ladder", [default_ladder, vllm_ladder])
@given(max_tokens=st.integers(1, 20000))
def test_ladders_increase_to_their_end(ladder, max_tokens: int) -> None:
    sizes = ladder(max_tokens)
    assert sizes[-1] == max_tokens
    assert all(a < b for a, b in pairwise(sizes))
    assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_above_the_capture_limit_only_doublings() -> None:
    buckets = token_buckets(max_num_batched_tokens=8192, max_num_seqs=256, draft_len=5)
    assert buckets[-5:] == (1280, 1536, 3072, 6144, 8192)


def test_drafting_for_many_requests_needs_no_program_of_its_own_in_the_doubling_ladder() -> None:
    assert row_buckets(64, "doubling") == (1, 4, 8, 16)
    assert row_buckets(5, "doubling") == (1, 4, 5)
    assert row_buckets(2, "doubling") == (1, 2)
    assert row_buckets(20) == (1, 2, 4, 8, 16, 20)


def test_explicit_capture_limit() -> None:
    buckets = token_buckets(
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        draft_len=7,
        ladder="vllm",
        max_capture_tokens=1024,
    )
    assert buckets == (*vllm_ladder(1024), 2048, 4096)


def test_a_limit_beyond_the_step_is_cut() -> None:
    buckets = token_buckets(max_num_batched_tokens=100, max_num_seqs=100, draft_len=7)
    assert buckets == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(max_num_batched_tokens=7, max_num_seqs=1), "raise --max-num-batched-tokens 7"),
        (
            dict(max_num_batched_tokens=16, max_num_seqs=17),
            "one token for each of --max-num-seqs 17",
        ),
        (
            dict(max_num_batched_tokens=64, max_num_seqs=4, max_capture_tokens=7),
            "--max-capture-tokens 7 does not hold one request's draft: raise it to at least 8",
        ),
    ],
)
def test_buckets_that_cannot_hold_a_request_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        token_buckets(draft_len=7, **arguments)


def test_bucket_for_at_the_edges() -> None:
    buckets = (1, 2, 4, 8)
    assert [bucket_for(buckets, n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    with pytest.raises(ValueError, match="9 tokens exceeds the largest bucket, 8"):
        bucket_for(buckets, 9)


def test_sizes_take_the_place_of_the_ladder():
    sizes = (1, 4, 8, 96)
    limits = dict(max_num_batched_tokens=512, max_num_seqs=64, draft_len=7, sizes=sizes)
    assert token_buckets(**limits) == (1, 4, 8, 96, 192, 384, 512)
    assert row_buckets(64, sizes=sizes) == (1, 4, 8, 64)
    assert row_buckets(4, sizes=sizes) == (1, 4)
    with pytest.raises(FlagError, match="does not hold one request's draft"):
        token_buckets(**(limits | {"sizes": (1, 4)}))
