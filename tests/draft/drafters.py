"""The drafter of released checkpoints, four requests at a time, as the tests and the parity report drive it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dspark_jax.draft.backbone import context_rows, run_block, write_context
from dspark_jax.draft.propose import Proposal, propose, token_logprobs
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.model.batch import TokenBatch, batch_from_chunks
from dspark_jax.model.cache import kept_tokens
from tests.parity.target import Twins
from tests.quick_jit import quick_jit

SLOTS = 4
TOKENS = 32
WINDOW = 8


class Drafted(NamedTuple):
    """Hidden states [R, G, M] of the block, and the proposal made from them, which keeps its logits [R, G, V]."""

    hidden: jax.Array
    proposal: Proposal


@partial(quick_jit, static_argnames="cfg")
def extend(params, ring, taps, batch: TokenBatch, accepted, *, cfg):
    """Write the context rows of each row's accepted tokens; the ring and all rows [stages, T, D]."""
    kept, behind = kept_tokens(batch, accepted)
    rows = context_rows(params, cfg, taps, batch.positions, dispatch=Dispatch())
    placed = {"slots": batch.token_slots, "positions": batch.positions}
    return write_context(ring, rows, **placed, kept=kept, behind=behind), rows


@partial(quick_jit, static_argnames="cfg")
def draft(params, target, ring, anchors, positions, slots, forced, *, cfg) -> Drafted:
    """Draft in every slot; slot k draws `forced[:, k]`, or the most likely token where that is -1."""
    where = {"anchors": anchors, "positions": positions, "slots": slots}
    where |= {"is_row": jnp.ones(SLOTS, bool), "dispatch": Dispatch()}

    def choose(logits, k, drafted, kept):
        token = jnp.where(forced[:, k] >= 0, forced[:, k], jnp.argmax(logits, axis=-1))
        return token, token_logprobs(logits, token), kept.at[:, k].set(logits)

    hidden = run_block(params, target, cfg, ring, **where)
    kept = jnp.zeros((SLOTS, cfg.draft.block_size, cfg.vocab_size))
    where |= {"choose": choose, "kept": kept}
    return Drafted(hidden, propose(params, target, cfg, ring, **where))


class Drafters:
    """Four requests whose context rows lie in one ring, and how to extend and ask it."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        shape = (twins.cfg.draft.num_stages, SLOTS, WINDOW, twins.cfg.head_dim)
        self.ring = jnp.full(shape, jnp.nan)
        self.lengths = np.zeros(SLOTS, int)

    def extend(self, features: dict[int, torch.Tensor], accepted: dict[int, int]) -> jax.Array:
        """Give slots their `features` [n, m * M], of which the first `accepted` are committed."""
        chunks = [(s, int(self.lengths[s]), np.zeros(len(f))) for s, f in features.items()]
        batch = batch_from_chunks(chunks, token_count=TOKENS, rows=SLOTS)
        width = self.twins.cfg.hidden_size
        taps = np.zeros((TOKENS, 3, width), np.float32)
        given = torch.cat(list(features.values())).numpy()
        taps[: len(given)] = given.reshape(-1, 3, width)
        counts = np.zeros(SLOTS, np.int32)
        counts[: len(features)] = [accepted[slot] for slot in features]
        self.ring, rows = extend(
            self.twins.draft_params, self.ring, taps, batch, counts, cfg=self.twins.cfg
        )
        for slot, count in accepted.items():
            self.lengths[slot] += count
        return rows

    def propose(self, anchors, forced=None) -> Drafted:
        """Draft after the anchors, one per slot."""
        if forced is None:
            forced = np.full((SLOTS, self.twins.cfg.draft.block_size), -1)
        return draft(
            self.twins.draft_params,
            self.twins.params,
            self.ring,
            jnp.asarray(anchors, jnp.int32),
            jnp.asarray(self.lengths, jnp.int32),
            jnp.arange(SLOTS),
            jnp.asarray(forced, jnp.int32),
            cfg=self.twins.cfg,
        )
