"""The drafting half of an engine step: a new proposal for every request that has just drawn a token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.decode import synthetic
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.inversion import NUMBERS, draw_draft
from dspark_jax.decode.packing import PackedRows, unpack_rows
from dspark_jax.decode.sampling import Stream, draw, if_wanted, uniform
from dspark_jax.decode.shaping import only_the_best, shaped_logits
from dspark_jax.decode.state import DecodeState, Proposals
from dspark_jax.decode.step import ModelParams
from dspark_jax.decode.verify import Method
from dspark_jax.draft.propose import propose, token_logprobs
from dspark_jax.kernels.dispatch import Dispatch


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What is fixed when the drafting half is compiled."""

    method: Method
    greedy_drafts: bool
    dispatch: Dispatch


def draft_step(
    params: ModelParams,
    state: DecodeState,
    packed: PackedRows,
    *,
    cfg: ModelConfig,
    options: DraftOptions,
    effort: Effort = Effort.AS_NEEDED,
) -> tuple[DecodeState, jax.Array]:
    """Propose G tokens for every row that sampled in the step before and has not ended.

    Each token is drawn with the request's own sampling parameters from the drafter's corrected logits, with the
    `effort` that the rows need, or more.

    Returns:
      The state with the proposals pending, and their conditional confidences, float32 [R, G].
    """
    assert params.draft is not None and cfg.draft is not None
    assert state.draft_window is not None
    assert state.proposals is not None
    rows = unpack_rows(packed)
    slots = state.positions.shape[0]
    slot = jnp.maximum(rows.slot, 0)
    active = rows.is_used & rows.samples & ~state.ended[slot]
    anchor_positions = state.positions[slot]
    sampling, drafts = rows.sampling, cfg.draft.block_size
    place_in_round = anchor_positions[:, None] * drafts + jnp.arange(drafts)
    numbers = if_wanted(
        effort,
        ~jnp.all(sampling.is_greedy),
        lambda _: uniform(sampling, place_in_round, Stream.DRAFT, (NUMBERS,)),
        jnp.zeros((*place_in_round.shape, NUMBERS)),
    )

    pending, at = state.proposals, jnp.where(active, rows.slot, slots)

    def choose(raw: jax.Array, k: jax.Array, drafted: jax.Array, kept: jax.Array):
        # Any distribution is exact if it is the one drawn from; one of NaN is none.
        usable = jnp.all(jnp.isfinite(raw), axis=-1, keepdims=True)
        raw = jnp.where(usable, raw, 0.0)
        positions = anchor_positions + 1 + k
        shaped = shaped_logits(raw, sampling, positions, slot, state.counts, drafted, effort)
        if options.greedy_drafts:
            shaped = only_the_best(shaped)
        if options.method is Method.COUPLED:
            token = draw(shaped, sampling, positions, effort=effort)
        else:
            token = draw_draft(shaped, sampling, numbers[:, k], effort=effort)
        return token, token_logprobs(shaped, token), kept.at[at, k].set(shaped, mode="drop")

    proposal = propose(
        params.draft,
        params.target,
        cfg,
        state.draft_window,
        anchors=state.anchors[slot],
        positions=anchor_positions,
        slots=slot,
        is_row=active,
        choose=choose,
        kept=pending.shaped,
        dispatch=options.dispatch,
    )
    confidences = proposal.confidences
    if options.method is Method.SYNTHETIC:
        assert state.synthetic is not None
        confidences = synthetic.publish(state.synthetic, sampling, anchor_positions, confidences)
    pending = Proposals(
        lens=pending.lens.at[at].set(drafts, mode="drop"),
        tokens=pending.tokens.at[at].set(proposal.tokens, mode="drop"),
        shaped=proposal.kept,
        logprobs=pending.logprobs.at[at].set(proposal.logprobs, mode="drop"),
        confidences=pending.confidences.at[at].set(confidences, mode="drop"),
    )
    return state.replace(proposals=pending), confidences
