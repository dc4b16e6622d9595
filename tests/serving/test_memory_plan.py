"""Memory is accounted for before it is taken."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.decode.state import init_state
from dspark_jax.model.cache import PageGeometry, page_tokens
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.memory_plan import MemoryPlan, choose_pages, make_plan, tree_bytes
from tests.checkpoint.tiny import tiny_config

CFG = tiny_config()
SLOTS, LENGTH = 3, 200


def plan(**changes) -> MemoryPlan:
    arguments = dict(
        num_slots=SLOTS,
        max_model_len=LENGTH,
        cache_dtype=jnp.bfloat16,
        parameter_bytes=1000,
        max_tokens=16,
        max_logit_rows=16,
        limit=1 << 30,
    )
    return make_plan(CFG, **(arguments | changes))


def test_slots_and_pages_are_the_bytes_of_the_state():
    per_page = page_tokens(CFG)
    geometry = PageGeometry(per_page, 7, -(-LENGTH // per_page))
    state = init_state(CFG, slots=SLOTS, geometry=geometry, with_drafter=True, dtype=jnp.bfloat16)
    made = plan()
    assert made.slots + 7 * made.page == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert tree_bytes(state) == made.slots + 7 * made.page
    without = make_plan(
        dataclasses.replace(CFG, draft=None),
        num_slots=SLOTS,
        max_model_len=LENGTH,
        cache_dtype=jnp.bfloat16,
        parameter_bytes=0,
        max_tokens=16,
        max_logit_rows=16,
        limit=None,
    )
    assert without.slots < made.slots
    assert without.page == made.page
    assert without.fitting_pages == (2 << 30) // without.page


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
        parameters=3 << 30, slots=1 << 30, page=1 << 20, workspace=2 << 30, limit=9 << 30
    )
    assert made.describe(512) == (
        "memory in GiB: weights 3.00, slots 1.00, 512 pages 0.50, step 2.00; 6.50 of 9.00"
    )
