"""Copies of rings: every array of a slot, in every row format, and nothing of any other slot."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import ModelConfig
from dspark_jax.decode.rings import Rings, copy_rings, init_snapshots, rings_of, with_rings
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry, page_tokens
from tests.checkpoint.tiny import assert_same, tiny_config
from tests.kernels.flash import FLASH, released
from tests.quick_jit import quick_jit
from tests.seeds import fresh_seed

SLOTS, PLACES = 3, 2
CFG = tiny_config()


def random_state(cfg: ModelConfig, row_format: RowFormat, seed: int) -> DecodeState:
    """Every array of the caches different in every row."""
    rng = np.random.default_rng(seed)
    state = init_state(
        cfg,
        slots=SLOTS,
        geometry=PageGeometry(page_tokens(cfg), 4, 4),
        with_drafter=cfg.draft is not None,
        dtype=jnp.bfloat16,
        row_format=row_format,
    )

    def draw(array: jax.Array) -> jax.Array:
        return jnp.asarray(rng.integers(1, 100, array.shape)).astype(array.dtype)

    drawn = jax.tree.map(draw, state.cache)
    window = None if state.draft_window is None else draw(state.draft_window)
    return state.replace(cache=drawn, draft_window=window)


def slot_of(rings: Rings, slot: int) -> Rings:
    return jax.tree.map(lambda array: array[:, slot], rings)


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda kind: kind.value)
@pytest.mark.parametrize("with_drafter", [True, False], ids=["drafting", "decoding"])
def test_a_slot_gets_what_another_had_when_it_was_saved(
    row_format: RowFormat, with_drafter: bool
) -> None:
    seed = fresh_seed()
    cfg = CFG if with_drafter else dataclasses.replace(CFG, draft=None)
    state, later = (random_state(cfg, row_format, seed + i) for i in range(2))
    copy = quick_jit(copy_rings)
    empty = init_snapshots(state, PLACES)
    snapshots = copy(empty, rings_of(state), np.int32(1), np.int32(2))
    assert_same(slot_of(snapshots, 1), slot_of(rings_of(state), 2))
    assert_same(slot_of(snapshots, 0), slot_of(empty, 0))
    restored = with_rings(later, copy(rings_of(later), snapshots, np.int32(0), np.int32(1)))
    assert_same(slot_of(rings_of(restored), 0), slot_of(rings_of(state), 2))
    for slot in (1, 2):
        assert_same(slot_of(rings_of(restored), slot), slot_of(rings_of(later), slot))
    # What is not per slot, or is made anew, is left alone.
    assert_same(with_rings(restored, rings_of(later)), later)


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda kind: kind.value)
def test_copying_writes_in_place_at_the_size_of_a_released_model(row_format: RowFormat) -> None:
    cfg = released(FLASH)
    state = jax.eval_shape(
        lambda: init_state(
            cfg,
            slots=64,
            geometry=PageGeometry(page_tokens(cfg), 64, 1),
            with_drafter=True,
            dtype=jnp.bfloat16,
            row_format=row_format,
        )
    )
    rings = rings_of(state)
    snapshots = jax.eval_shape(partial(init_snapshots, count=32), state)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for into, source in ((snapshots, rings), (rings, snapshots)):
        program = jax.jit(copy_rings, donate_argnums=0).lower(into, source, number, number)
        memory = program.compile().memory_analysis()
        assert memory.temp_size_in_bytes == 0
        assert memory.alias_size_in_bytes == sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(into)
        )


def test_all_that_lies_in_slots_is_copied_but_open_heavy_windows() -> None:
    """An array that is added to the cache must be copied too, or be listed here."""
    state = random_state(CFG, RowFormat.PLAIN, 0)
    copied = set(map(id, jax.tree.leaves(rings_of(state))))
    left: dict[str, Any] = {**vars(state), **vars(state.cache)}
    names = {
        name
        for name, tree in left.items()
        for array in jax.tree.leaves(tree)
        if id(array) not in copied and name != "cache"
    }
    pages = {"csa_entries", "index_keys", "hca_entries"}
    made_anew = {"positions", "anchors", "ended", "proposals"}
    of_the_request = {"counts"}
    assert names == pages | made_anew | of_the_request | {"hca_open"}
