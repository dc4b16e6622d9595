"""Memory is accounted for before it is taken."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.decode.rings import init_snapshots
from dspark_jax.decode.state import init_state
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry, page_tokens
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.memory_plan import MemoryPlan, choose_pages, make_plan, tree_bytes
from tests.checkpoint.tiny import tiny_config

CFG = tiny_config()
SLOTS, LENGTH = 3, 200


def plan(cfg: ModelConfig = CFG, **changes) -> MemoryPlan:
    arguments = dict(
        num_slots=SLOTS,
        max_model_len=LENGTH,
        cache_dtype=jnp.bfloat16,
        parameter_bytes=1000,
        max_tokens=16,
        max_logit_rows=16,
        limit=1 << 30,
    )
    return make_plan(cfg, **(arguments | changes))


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda kind: kind.value)
def test_slots_and_pages_are_the_bytes_of_the_state(row_format):
    per_page = page_tokens(CFG)
    geometry = PageGeometry(per_page, 7, -(-LENGTH // per_page))
    state = init_state(
        CFG,
        slots=SLOTS,
        geometry=geometry,
        with_drafter=True,
        dtype=jnp.bfloat16,
        row_format=row_format,
    )
    made = plan(row_format=row_format)
    assert made.slots + 7 * made.page == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert tree_bytes(state) == made.slots + 7 * made.page
    without = make_plan(
        dataclasses.replace(CFG, draft=None),
        num_slots=SLOTS,
        max_model_len=LENGTH,
        cache_dtype=jnp.bfloat16,
        row_format=row_format,
        parameter_bytes=0,
        max_tokens=16,
        max_logit_rows=16,
        limit=None,
    )
    assert without.slots < made.slots
    assert without.page == made.page
    assert without.fitting_pages == (2 << 30) // without.page


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda kind: kind.value)
@pytest.mark.parametrize("with_drafter", [True, False])
def test_snapshots_are_the_bytes_of_their_arrays(row_format, with_drafter):
    cfg = CFG if with_drafter else dataclasses.replace(CFG, draft=None)
    state = init_state(
        cfg,
        slots=SLOTS,
        geometry=PageGeometry(page_tokens(cfg), 7, 4),
        with_drafter=with_drafter,
        dtype=jnp.bfloat16,
        row_format=row_format,
    )
    none = plan(cfg, row_format=row_format)
    some = plan(cfg, row_format=row_format, num_snapshots=5)
    assert some.snapshots == tree_bytes(init_snapshots(state, 5))
    assert some == dataclasses.replace(none, snapshots=some.snapshots)
    pages_bytes = (none.fitting_pages - some.fitting_pages) * some.page
    assert abs(pages_bytes - some.snapshots) < some.page


def test_pages_are_what_fits_at_most_every_slot_at_full_length():
    made = plan()
    ask = dict(num_slots=SLOTS, max_model_len=LENGTH)
    full = choose_pages(made, CFG, **ask, asked=None)
    assert full.pages == SLOTS * full.max_pages
    tight = dataclasses.replace(
        made, limit=made.parameters + made.slots + made.workspace + 14 * made.page
    )
    assert tight.fitting_pages == 14
    assert choose_pages(tight, CFG, **ask, asked=None).pages == min(14, full.pages)
    assert choose_pages(tight, CFG, **ask, asked=14).pages == 14


def test_fp8_takes_one_byte_a_channel_and_its_scales():
    """Of a page: entries of every layer, and keys of those with an indexer."""
    tokens, width, rotary = page_tokens(CFG), CFG.head_dim, CFG.qk_rope_head_dim
    row = width - rotary + 2 * rotary + 4 * -(-(width - rotary) // 256)
    csa, hca = (len(CFG.indices_of(kind)) for kind in (AttentionKind.CSA, AttentionKind.HCA))
    in_csa, in_hca = csa * tokens // CFG.csa_ratio, hca * tokens // CFG.hca_ratio
    key = CFG.index_head_dim + 4
    made = plan(row_format=RowFormat.FP8)
    assert made.page == (in_csa + in_hca) * row + in_csa * key
    # The drafter's ring is plain.
    ring = CFG.num_hidden_layers * SLOTS * CFG.sliding_window
    assert plan().slots - made.slots == ring * (2 * width - row)
    codes = [in_csa * (width - rotary), in_csa * CFG.index_head_dim, in_hca * (width - rotary)]
    assert made.fp8_pools == tuple(sorted(codes))
    assert made.fp8_rings == (ring * (width - rotary),)
    assert not plan().fp8_pools
    assert not plan().fp8_rings


def test_pages_make_no_array_of_fp8_that_kernels_do_not_reach():
    made = dataclasses.replace(plan(), limit=1 << 40)
    ask = dict(num_slots=1 << 20, max_model_len=LENGTH)
    full = choose_pages(made, CFG, **ask, asked=None).pages
    # Beyond 4 GiB offsets have 64 bits.
    for size, pages in ((2**33 // full, full), (2**31 // full, full), (3 * 2**30 // full, None)):
        some = dataclasses.replace(made, fp8_pools=(7, size))
        assert choose_pages(some, CFG, **ask, asked=None).pages == (pages or 2**31 // size)
    # Both pools would lie between: the larger decides.
    some = dataclasses.replace(made, fp8_pools=(3 * 2**30 // full, 5 * 2**30 // full))
    assert choose_pages(some, CFG, **ask, asked=None).pages == 2**31 // (5 * 2**30 // full)
    with pytest.raises(FlagError, match=r"change --num-pages, or use --kv-cache-dtype auto"):
        choose_pages(some, CFG, **ask, asked=full // 2)
    rings = dataclasses.replace(made, fp8_rings=(3 * 2**30,))
    with pytest.raises(FlagError, match=r"array of 3\.00 GiB.* change --max-num-seqs"):
        choose_pages(rings, CFG, **ask, asked=None)


@pytest.mark.parametrize("asked", [None, 14])
def test_what_does_not_fit_is_refused_with_numbers_and_flags(asked):
    made = plan()
    small = dataclasses.replace(
        made, limit=made.parameters + made.slots + made.workspace + made.page
    )
    with pytest.raises(FlagError) as refusal:
        choose_pages(small, CFG, num_slots=SLOTS, max_model_len=LENGTH, asked=asked)
    text = str(refusal.value)
    assert "room for 1 cache pages" in text
    assert "needed for one request of 200 tokens" in text
    for flag in ("--max-num-seqs", "--num-pages", "--gpu-memory-utilization", "--hf-overrides"):
        assert flag in text


def test_the_line_for_the_log_adds_up():
    made = MemoryPlan(
        parameters=3 << 30,
        slots=1 << 30,
        snapshots=1 << 29,
        page=1 << 20,
        workspace=2 << 30,
        limit=9 << 30,
    )
    assert made.describe(512) == (
        "memory in GiB: weights 3.00, slots 1.00, snapshots 0.50, 512 pages 0.50, step 2.00; 7.00 of 9.00"
    )
    assert made.fitting_pages == 2560
