"""The first part of a verification: admit drafts, run the target, and compute the logits that are needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.decode.allocate import allocate
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import PackedPlan, Rows, unpack_rows
from dspark_jax.decode.state import DecodeState
from dspark_jax.model.batch import TokenBatch, layout
from dspark_jax.model.cache import Cache, StepRows
from dspark_jax.model.params import Params
from dspark_jax.model.transformer import forward, logits


class Picked(struct.PyTreeNode):
    """The tokens whose logits are needed, compacted to C."""

    token: jax.Array  # [C] flat token, T where unused
    row_of: jax.Array  # [C] request row, R where unused
    base: jax.Array  # [R] first verification row of each request


class Scored(struct.PyTreeNode):
    """What the target says of a step's T tokens, before any verdict."""

    batch: TokenBatch
    verify_lens: jax.Array  # [R] int32, drafts admitted
    picked: Picked
    raw: jax.Array  # [C, V] float32, logits of the picked tokens
    rows: StepRows  # to be committed once it is known what was accepted
    taps: jax.Array | None  # [T, taps, M] what the drafter's context is made of


def score(
    params: Params,
    state: DecodeState,
    plan: PackedPlan,
    *,
    cfg: ModelConfig,
    options: StepOptions,
    with_taps: bool,
) -> tuple[Cache, Scored]:
    """Run the target over every planned row: its anchor and admitted drafts, or its prompt chunk.

    Returns:
      The cache with the entries of windows that closed in this step, and what `settle` needs.
    """
    rows = unpack_rows(plan.rows)
    slots = jnp.maximum(rows.slot, 0)
    live = live_rows(state, rows)
    verify_lens = _admit(state, rows, slots, live, jnp.asarray(plan.budget))
    batch = _lay_out(state, rows, slots, live, verify_lens, plan, options.tokens)
    out = forward(
        params,
        cfg,
        batch,
        state.cache,
        jnp.asarray(plan.page_table),
        dispatch=options.dispatch,
        tap_layers=cfg.draft.target_layer_ids if with_taps and cfg.draft else (),
    )
    picked = _pick(batch, rows, sampling_rows(rows, live), verify_lens, options.logit_rows)
    raw = logits(params, out.hidden[jnp.minimum(picked.token, options.tokens - 1)])
    return out.cache, Scored(
        batch=batch,
        verify_lens=verify_lens,
        picked=picked,
        raw=raw,
        rows=out.rows,
        taps=out.taps,
    )


def scored_tree(cache: Cache, leaf: Any, *, with_taps: bool) -> Scored:
    """The structure of what `score` returns for this cache, without a trace: `leaf` in place of every array."""

    def like(ring: Any) -> Any:
        return None if ring is None else leaf

    return Scored(
        batch=TokenBatch(*(leaf for _ in dataclasses.fields(TokenBatch))),
        verify_lens=leaf,
        picked=Picked(token=leaf, row_of=leaf, base=leaf),
        raw=leaf,
        rows=StepRows(
            window=like(cache.window),
            csa_open=like(cache.csa_open),
            index_open=like(cache.index_open),
            hca_open=like(cache.hca_open),
        ),
        taps=leaf if with_taps else None,
    )


def live_rows(state: DecodeState, rows: Rows) -> jax.Array:
    """Rows that continue a text which the device has not ended: bool [R]."""
    return rows.is_decode & ~state.ended[jnp.maximum(rows.slot, 0)]


def sampling_rows(rows: Rows, live: jax.Array) -> jax.Array:
    """Rows that draw a token in this step: bool [R]."""
    return live | (rows.is_used & ~rows.is_decode & rows.samples)


def _admit(
    state: DecodeState, rows: Rows, slots: jax.Array, live: jax.Array, budget: jax.Array
) -> jax.Array:
    """How many pending drafts of each row are verified in this step: int32 [R]."""
    if state.proposals is None:
        return jnp.zeros(slots.shape, jnp.int32)
    with jax.named_scope("allocate"):
        # A row may still emit limit - position - 1 tokens, and a verification emits one more than its drafts.
        room = rows.limit - state.positions[slots] - 2
        caps = jnp.minimum(jnp.minimum(rows.draft_cap, state.proposals.lens[slots]), room)
        caps = jnp.where(live, jnp.maximum(caps, 0), 0)
        return allocate(state.proposals.confidences[slots], caps, budget, rows.min_depth)


def _lay_out(
    state: DecodeState,
    rows: Rows,
    slots: jax.Array,
    live: jax.Array,
    verify_lens: jax.Array,
    plan: PackedPlan,
    tokens: int,
) -> TokenBatch:
    """Flat tokens of the step: prompt chunks from the plan, anchors and admitted drafts from the state."""
    q_lens = jnp.where(live, 1 + verify_lens, rows.num_prompt)
    starts = jnp.where(rows.is_decode, state.positions[slots], rows.start)
    batch, within = layout(tokens, slots, starts, q_lens)
    row = jnp.maximum(batch.seq_ids, 0)
    offset = jnp.cumsum(rows.num_prompt) - rows.num_prompt
    place = jnp.clip(offset[row] + within, 0, tokens - 1)
    from_prompt = jnp.asarray(plan.prompt_ids)[place]
    from_state = state.anchors[batch.token_slots]
    if state.proposals is not None:
        column = jnp.clip(within - 1, 0, state.proposals.tokens.shape[1] - 1)
        drafted = state.proposals.tokens[batch.token_slots, column]
        from_state = jnp.where(within == 0, from_state, drafted)
    ids = jnp.where(rows.is_decode[row], from_state, from_prompt)
    return batch.replace(token_ids=jnp.where(batch.is_token, ids, 0))


def _pick(
    batch: TokenBatch, rows: Rows, samples: jax.Array, verify_lens: jax.Array, count: int
) -> Picked:
    """Compact the tokens that need logits: verification rows, and prompt tokens whose probability is wanted."""
    tokens = batch.token_ids.shape[0]
    row = jnp.maximum(batch.seq_ids, 0)
    ends = batch.cu_q_lens[1:]
    verified_from = jnp.where(samples, ends - 1 - verify_lens, tokens)
    flat = jnp.arange(tokens)
    wanted = batch.is_token & ((flat >= verified_from[row]) | rows.wants_prompt_logprobs[row])
    token = jnp.nonzero(wanted, size=count, fill_value=tokens)[0].astype(jnp.int32)
    before = jnp.cumsum(wanted) - wanted
    owner = jnp.append(batch.seq_ids, -1)[token]
    return Picked(
        token=token,
        row_of=jnp.where(owner >= 0, owner, samples.shape[0]),
        base=before[jnp.clip(verified_from, 0, tokens - 1)].astype(jnp.int32),
    )
