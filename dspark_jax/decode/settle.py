"""The second part of a verification: judge the drafts, draw the next tokens, and commit what was accepted."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.decode import synthetic
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import PackedRows, Rows, unpack_rows
from dspark_jax.decode.plan import RowFinish
from dspark_jax.decode.sampling import draw
from dspark_jax.decode.score import Picked, Scored, live_rows, sampling_rows
from dspark_jax.decode.shaping import shaped_logits
from dspark_jax.decode.state import DecodeState, TokenCounts
from dspark_jax.decode.threshold import largest
from dspark_jax.decode.verify import (
    LogitRows,
    Method,
    Verdict,
    verify_coupled,
    verify_standard,
)
from dspark_jax.draft.backbone import context_rows, write_context
from dspark_jax.draft.params import DraftParams
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.model.batch import TokenBatch
from dspark_jax.model.cache import commit, kept_tokens

MAX_LOGPROBS = 20


class DeviceLogprobs(struct.PyTreeNode):
    """Log-probabilities of rows [N] under the target's raw logits."""

    chosen: jax.Array  # [N] float32
    top_ids: jax.Array  # [N, 20] int32
    top: jax.Array  # [N, 20] float32


class DeviceOutputs(struct.PyTreeNode):
    """See `decode.plan.StepOutputs`; `ints` holds tokens (G + 1), num_tokens, finish and verify_lens by column."""

    ints: jax.Array  # [R, G + 4] int32
    logprobs: DeviceLogprobs  # N = R * (G + 1)
    prompt_logprobs: DeviceLogprobs  # N = C, the rows of prompt tokens first, in flat order


class _Best(NamedTuple):
    """What log-probabilities of raw logits [C, V] are made of."""

    norm: jax.Array  # [C] float32, log-sum-exp
    ids: jax.Array  # [C, 20] int32, most likely first
    top: jax.Array  # [C, 20] float32, their log-probabilities


def settle(
    draft: DraftParams | None,
    state: DecodeState,
    packed: PackedRows,
    scored: Scored,
    *,
    cfg: ModelConfig,
    options: StepOptions,
    effort: Effort,
) -> tuple[DecodeState, DeviceOutputs]:
    """Judge what was scored. Afterwards no touched slot has a pending draft; `draft_step` makes the next.

    Args:
      draft: what `draft.params.context_params` keeps, None without a drafter.
      state: with the cache that `score` returned.
      effort: what the rows need between logits and tokens, or more.
    """
    rows = unpack_rows(packed)
    slots = jnp.maximum(rows.slot, 0)
    samples = sampling_rows(rows, live_rows(state, rows))
    batch, picked = scored.batch, scored.picked
    state = state.replace(counts=_count_prompt(state.counts, batch, rows))
    newest = jnp.where(rows.is_decode, state.positions[slots], rows.start + rows.num_prompt - 1)
    where = LogitRows(picked.base, scored.verify_lens, newest)
    with jax.named_scope("verify"):
        verdict = _judge(state, rows, slots, scored, where, options, effort)
        best = _best_if_wanted(scored.raw, rows, effort)
        tokens, num_tokens, finish = _end(verdict, rows, samples, where, picked, scored.raw)
    with jax.named_scope("commit"):
        accepted = jnp.where(rows.is_decode, num_tokens, rows.num_prompt)
        state = _commit(state, scored, rows, tokens, num_tokens, finish, samples, newest, accepted)
    if draft is not None:
        state = _extend_context(draft, state, scored, rows, accepted, cfg, options.dispatch)
    summary = jnp.stack([num_tokens, finish, scored.verify_lens], axis=1)
    return state, _outputs(rows, slots, scored, best, tokens, summary)


def _judge(
    state: DecodeState,
    rows: Rows,
    slots: jax.Array,
    scored: Scored,
    where: LogitRows,
    options: StepOptions,
    effort: Effort,
) -> Verdict:
    """Judge the admitted drafts of every row and draw the token that follows the accepted ones."""
    batch, picked = scored.batch, scored.picked
    # Of each logit row [C]: its request, and the position of the token that it predicts.
    owner = jnp.minimum(picked.row_of, slots.shape[0] - 1)
    place = batch.positions[jnp.minimum(picked.token, batch.positions.shape[0] - 1)] + 1
    proposals = state.proposals
    drafted = None
    if proposals is not None:
        within = jnp.arange(picked.token.shape[0]) - where.base[owner]
        column = jnp.arange(proposals.tokens.shape[1])
        ahead = column < jnp.minimum(within, where.verify_lens[owner])[:, None]
        drafted = jnp.where(ahead, proposals.tokens[slots[owner]], -1)
    sampling = rows.sampling.take(owner)
    shaped = shaped_logits(scored.raw, sampling, place, slots[owner], state.counts, drafted, effort)
    if proposals is None:
        last = draw(
            shaped[jnp.minimum(where.base, shaped.shape[0] - 1)],
            rows.sampling,
            where.positions + 1,
            effort=effort,
        )
        return Verdict(last[:, None], jnp.zeros_like(last))
    tokens = proposals.tokens[slots]
    if options.method is Method.COUPLED:
        return verify_coupled(shaped, tokens, where, rows.sampling, picked.row_of, effort=effort)
    judge = None
    if options.method is Method.SYNTHETIC:
        assert state.synthetic is not None
        judge = partial(synthetic.judge, state.synthetic, rows.sampling, where.positions)
    return verify_standard(
        shaped,
        tokens,
        proposals.logprobs[slots],
        lambda k: proposals.shaped[slots, k],
        where,
        rows.sampling,
        judge,
        effort=effort,
    )


def _end(
    verdict: Verdict,
    rows: Rows,
    samples: jax.Array,
    where: LogitRows,
    picked: Picked,
    raw: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cut each row at its first stop id and at its limit: tokens [R, G+1], num_tokens [R], finish [R]."""
    tokens, accept_lens = verdict
    room = rows.limit - where.positions - 1
    stop_ids = rows.sampling.stop_ids
    is_stop = jnp.any((tokens[..., None] == stop_ids[:, None]) & (stop_ids[:, None] >= 0), axis=-1)
    place = jnp.arange(tokens.shape[1])
    is_stop &= place <= accept_lens[:, None]
    stops = jnp.any(is_stop, axis=1)
    until_stop = jnp.where(stops, jnp.argmax(is_stop, axis=1) + 1, accept_lens + 1)
    num_tokens = jnp.minimum(until_stop, room)
    stops &= until_stop <= room
    bad = jnp.zeros(samples.shape[0], bool)
    bad = bad.at[picked.row_of].max(~jnp.all(jnp.isfinite(raw), axis=-1), mode="drop")
    finish = jnp.where(
        stops, RowFinish.STOP, jnp.where(num_tokens >= room, RowFinish.LENGTH, RowFinish.RUNNING)
    )
    finish = jnp.where(bad, RowFinish.NON_FINITE, finish)
    num_tokens = jnp.where(samples & ~bad, num_tokens, 0)
    finish = jnp.where(samples | bad, finish, RowFinish.RUNNING)
    return tokens, num_tokens.astype(jnp.int32), finish.astype(jnp.int32)


def _count_prompt(counts: TokenCounts, batch: TokenBatch, rows: Rows) -> TokenCounts:
    """Count the prompt tokens of rows with penalties; a row that starts at 0 first forgets its slot's past.

    Without a branch, although most steps have nothing to count: XLA:GPU copies all counts in and out of one.
    """
    penalized = rows.sampling.has_penalty & rows.is_used & ~rows.is_decode
    slots = counts.output.shape[0]
    fresh = jnp.where(penalized & (rows.start == 0), rows.slot, slots)
    output = counts.output.at[fresh].set(0, mode="drop")
    prompt = counts.prompt.at[fresh].set(False, mode="drop")
    row = jnp.maximum(batch.seq_ids, 0)
    counted = batch.is_token & penalized[row]
    was_output = batch.positions >= rows.prompt_len[row]
    into_output = jnp.where(counted & was_output, batch.token_slots, slots)
    into_prompt = jnp.where(counted & ~was_output, batch.token_slots, slots)
    return TokenCounts(
        output=output.at[into_output, batch.token_ids].add(1, mode="drop"),
        prompt=prompt.at[into_prompt, batch.token_ids].set(True, mode="drop"),
    )


def _commit(
    state: DecodeState,
    scored: Scored,
    rows: Rows,
    tokens: jax.Array,
    num_tokens: jax.Array,
    finish: jax.Array,
    samples: jax.Array,
    newest: jax.Array,
    accepted: jax.Array,
) -> DecodeState:
    """Keep what was accepted: rows into rings, lengths forward, the last token as the new anchor."""
    slots = state.positions.shape[0]
    touched = jnp.where(rows.is_used, rows.slot, slots)
    drew = jnp.where(num_tokens > 0, rows.slot, slots)
    last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    # The anchor stands one behind the last token that is fed and kept.
    position = jnp.where(samples, newest + num_tokens, rows.start + rows.num_prompt)
    moved = jnp.where(samples & (num_tokens == 0), slots, touched)
    moved = jnp.where(rows.is_decode & ~samples, slots, moved)
    was_ended = rows.is_decode & state.ended[jnp.maximum(rows.slot, 0)]
    ended = was_ended | (finish != RowFinish.RUNNING)
    return state.replace(
        cache=commit(state.cache, scored.rows, scored.batch, accepted),
        positions=state.positions.at[moved].set(position, mode="drop"),
        anchors=state.anchors.at[drew].set(last, mode="drop"),
        ended=state.ended.at[touched].set(ended, mode="drop"),
        counts=_count_output(state.counts, rows, tokens, num_tokens),
    )


def _count_output(
    counts: TokenCounts, rows: Rows, tokens: jax.Array, num_tokens: jax.Array
) -> TokenCounts:
    """Count the committed tokens of rows with penalties."""
    penalized = rows.sampling.has_penalty & rows.is_used
    kept = penalized[:, None] & (jnp.arange(tokens.shape[1]) < num_tokens[:, None])
    slot = jnp.where(kept, rows.slot[:, None], counts.output.shape[0])
    return counts.replace(output=counts.output.at[slot, tokens].add(1, mode="drop"))


def _extend_context(
    draft: DraftParams,
    state: DecodeState,
    scored: Scored,
    rows: Rows,
    accepted: jax.Array,
    cfg: ModelConfig,
    dispatch: Dispatch,
) -> DecodeState:
    """Give the drafter its context rows of the committed tokens, and forget the proposals that were judged."""
    assert scored.taps is not None
    assert state.draft_window is not None
    assert state.proposals is not None
    batch = scored.batch
    kept, behind = kept_tokens(batch, accepted)
    with jax.named_scope("draft_context"):
        window = write_context(
            state.draft_window,
            context_rows(draft, cfg, scored.taps, batch.positions, dispatch=dispatch),
            slots=batch.token_slots,
            positions=batch.positions,
            kept=kept,
            behind=behind,
        )
    touched = jnp.where(rows.is_used, rows.slot, state.positions.shape[0])
    lens = state.proposals.lens.at[touched].set(0, mode="drop")
    return state.replace(draft_window=window, proposals=state.proposals.replace(lens=lens))


def _outputs(
    rows: Rows,
    slots: jax.Array,
    scored: Scored,
    best: _Best,
    tokens: jax.Array,
    summary: jax.Array,
) -> DeviceOutputs:
    """Pack what the host reads; `summary` [R, 3] holds the columns behind the tokens."""
    batch, picked, raw = scored.batch, scored.picked, scored.raw
    drawn_row = picked.base[:, None] + jnp.arange(tokens.shape[1])
    drawn_row = jnp.minimum(drawn_row, raw.shape[0] - 1).reshape(-1)
    # The token that follows a prompt token is the next one fed; behind the last one nothing follows yet.
    follower = jnp.append(batch.token_ids[1:], 0)
    fed = jnp.minimum(picked.token, batch.token_ids.shape[0] - 1)
    owner = jnp.minimum(picked.row_of, slots.shape[0] - 1)
    is_prompt = (picked.row_of < slots.shape[0]) & rows.wants_prompt_logprobs[owner]
    prompt_row = jnp.nonzero(is_prompt, size=raw.shape[0], fill_value=0)[0]

    def describe(row: jax.Array, chosen: jax.Array) -> DeviceLogprobs:
        return DeviceLogprobs(
            chosen=raw[row, chosen] - best.norm[row], top_ids=best.ids[row], top=best.top[row]
        )

    return DeviceOutputs(
        ints=jnp.concatenate([tokens, summary], axis=1).astype(jnp.int32),
        logprobs=describe(drawn_row, tokens.reshape(-1)),
        prompt_logprobs=describe(prompt_row, follower[fed][prompt_row]),
    )


def _best_if_wanted(raw: jax.Array, rows: Rows, effort: Effort) -> _Best:
    """The most likely tokens of raw logits [C, V], or zeros where no row wants them."""
    if effort is Effort.PLAIN:
        return _no_best(raw)
    if effort is Effort.FULL:
        return _best(raw)
    wanted = jnp.any(rows.wants_logprobs | rows.wants_prompt_logprobs)
    return jax.lax.cond(wanted, _best, _no_best, raw)


def _best(raw: jax.Array) -> _Best:
    """The most likely tokens of raw logits [C, V]."""
    norm = jax.nn.logsumexp(raw, axis=-1)
    top, ids = largest(raw, min(MAX_LOGPROBS, raw.shape[1]))
    return _Best(norm, ids, top - norm[:, None])


def _no_best(raw: jax.Array) -> _Best:
    """Zeros in place of `_best`, where nobody wants it."""
    shape = (raw.shape[0], min(MAX_LOGPROBS, raw.shape[1]))
    return _Best(
        jnp.zeros(shape[0], jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
    )
