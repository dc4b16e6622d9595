"""The model with its operations in interpreted kernels, against the reference implementation of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import ModelConfig
from dspark_jax.draft.backbone import context_rows, run_block, write_context
from dspark_jax.draft.params import context_params, draft_by_column, draft_specs
from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.expert_mlp.cases import random_weight
from dspark_jax.kernels.quantized import ColumnWeight
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.batch import batch_from_chunks
from dspark_jax.model.cache import PageGeometry, commit, init_cache, kept_tokens
from dspark_jax.model.params import Spec, init_params, param_specs, params_by_column
from dspark_jax.model.transformer import forward, logits
from tests.kernels.flash import FLASH, released
from tests.parity.compare import FLOAT32_UNROLLED, Tolerance, assert_close
from tests.quick_jit import quick_jit
from tests.seeds import fresh_seed

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 8, 0],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_hash_layers": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 63,
    "dspark_target_layer_ids": [0, 2],
    "dspark_markov_rank": 16,
    "dspark_num_stages": 1,
}
SLOTS, TOKENS = 3, 12
ROUNDED = Tolerance(5e-2, 2e-2, 2e-5)
"""Kernels round activations that meet quantised weights to float16, in several layers one after the other.

Differences of float32 between them and the references can move a cache row's value to the next code of e4m3.
"""


def store_quantized(params: Any, specs: Any, cfg: ModelConfig, seed: int) -> Any:
    """The tree with random matrices in the storage of a released checkpoint where that is fp8 or fp4."""

    def store(spec: Spec, leaf: Any) -> Any:
        storage = cfg.expert_dtype if spec.storage == "expert" else spec.storage
        if storage not in ("fp8", "fp4"):
            return leaf
        key = jax.random.fold_in(jax.random.key(seed), leaf.size)
        return random_weight(key, spec.shape, storage, jnp.float32)

    return jax.tree.map(store, specs, params, is_leaf=lambda x: isinstance(x, Spec))


def run(
    cfg: ModelConfig,
    params: Any,
    draft: Any,
    seed: int,
    dispatch: Dispatch,
    *,
    drafts: bool,
    row_format: RowFormat = RowFormat.PLAIN,
) -> dict[str, Any]:
    """A prompt and a later step of two requests, then, if asked for, a draft block after them."""
    rng = np.random.default_rng(seed)
    geometry = PageGeometry(tokens=16, pages=8, max_pages=3)
    page_table = jnp.asarray(rng.permutation(8)[:6].reshape(2, 3).tolist() + [[-1] * 3], jnp.int32)
    cache = init_cache(cfg, slots=SLOTS, geometry=geometry, row_format=row_format, fill=jnp.nan)
    ring = jnp.full((1, SLOTS, cfg.sliding_window, cfg.head_dim), jnp.nan)
    assert cfg.draft is not None
    taps_after = cfg.draft.target_layer_ids

    def step(params, draft, cache, ring, batch, accepted):
        out = forward(
            params,
            cfg,
            batch,
            cache,
            page_table,
            dispatch=dispatch,
            tap_layers=taps_after,
        )
        assert out.taps is not None
        kept, behind = kept_tokens(batch, accepted)
        own = context_params(draft)  # what a step is given
        rows = context_rows(own, cfg, out.taps, batch.positions, dispatch=dispatch)
        placed = {"slots": batch.token_slots, "positions": batch.positions}
        ring = write_context(ring, rows, **placed, kept=kept, behind=behind)
        cache = commit(out.cache, out.rows, batch, accepted)
        return cache, ring, logits(params, out.hidden)

    step = quick_jit(step)
    results: dict[str, Any] = {}
    plans = [[(0, 0, 9)], [(1, 0, 5), (0, 9, 4)]]
    for number, plan in enumerate(plans):
        chunks = [(s, start, rng.integers(0, cfg.vocab_size, n)) for s, start, n in plan]
        batch = batch_from_chunks(chunks, token_count=TOKENS, rows=SLOTS)
        accepted = jnp.asarray([n for _, _, n in plan] + [0] * (SLOTS - len(plan)))
        cache, ring, scores = step(params, draft, cache, ring, batch, accepted)
        used = sum(n for _, _, n in plan)
        results[f"logits {number}"] = scores[:used]
    if not drafts:
        return results
    where = {"positions": jnp.asarray([13, 5]), "slots": jnp.arange(2)}
    block = quick_jit(
        lambda draft, params, ring: run_block(
            draft,
            params,
            cfg,
            ring,
            anchors=jnp.asarray([3, 4]),
            is_row=jnp.ones(2, bool),
            dispatch=dispatch,
            **where,
        )
    )
    return results | {"draft block": block(draft, params, ring)}


@pytest.mark.parametrize(
    ("quantized", "row_format"),
    [
        (False, RowFormat.PLAIN),
        (True, RowFormat.PLAIN),
        (False, RowFormat.ROUNDED),
        (False, RowFormat.FP8),
    ],
    ids=["float32", "quantized", "rounded rows", "fp8 rows"],
)
def test_kernels_equal_the_references(quantized: bool, row_format: RowFormat) -> None:
    seed = fresh_seed()
    rounds = quantized or row_format is not RowFormat.PLAIN
    # Rounding must not turn a choice of experts: where there is some, tables choose.
    cfg = released(FLASH | TINY, num_hash_layers=3 if rounds else 1)
    draw = partial(init_params, experts=cfg.n_routed_experts)
    params = draw(param_specs(cfg), jax.random.key(seed))
    if quantized:
        params = store_quantized(params, param_specs(cfg), cfg, seed)
    draft = draw(draft_specs(cfg), jax.random.key(seed + 1))
    kernels = Dispatch(Backend.PALLAS, interpret=True)
    expected, actual = (
        run(cfg, params, draft, seed, dispatch, drafts=not rounds, row_format=row_format)
        for dispatch in (Dispatch(), kernels)
    )
    for name, wanted in expected.items():
        assert np.isfinite(np.asarray(wanted)).all(), name
        assert_close(actual[name], wanted, ROUNDED if rounds else FLOAT32_UNROLLED, name)


def test_columns_equal_rows() -> None:
    seed = fresh_seed()
    cfg = released(FLASH | TINY)
    draw = partial(init_params, experts=cfg.n_routed_experts)

    def halved(tree: Any) -> Any:
        """The tree with every value rounded to one that bfloat16 holds."""
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x, tree
        )

    params = halved(draw(param_specs(cfg), jax.random.key(seed)))
    draft = halved(draw(draft_specs(cfg), jax.random.key(seed + 1)))
    columns, draft_columns = params_by_column(params), draft_by_column(draft)
    assert isinstance(columns.blocks.w_gate_up, ColumnWeight)
    expected = run(cfg, params, draft, seed, Dispatch(), drafts=True)
    actual = run(cfg, columns, draft_columns, seed, Dispatch(), drafts=True)
    for name, wanted in expected.items():
        assert np.isfinite(np.asarray(wanted)).all(), name
        assert_close(actual[name], wanted, FLOAT32_UNROLLED, name)
