"""Flat tokens: a step's tokens in one row, with metadata that says whose they are and where they stand.

The tokens of one request are contiguous and in order, so a request may bring any number of them: one, a draft to
verify, a chunk of its prompt. Padding tokens carry `seq_ids == -1`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


class TokenBatch(struct.PyTreeNode):
    """T tokens of up to R requests. All arrays are int32."""

    token_ids: jax.Array  # [T]
    positions: jax.Array  # [T] absolute; 0 for padding
    seq_ids: jax.Array  # [T] request row, -1 for padding
    slots: jax.Array  # [R] cache slot of each row; rows without tokens may hold any valid slot
    starts: jax.Array  # [R] absolute position of the row's first token in this step
    cu_q_lens: (
        jax.Array
    )  # [R + 1] first flat token of each row; rows that are not used have length 0

    @property
    def is_token(self) -> jax.Array:
        """[T] bool, False for padding."""
        return self.seq_ids >= 0

    @property
    def token_slots(self) -> jax.Array:
        """[T] cache slot of each token; padding reports some valid slot."""
        return self.slots[jnp.maximum(self.seq_ids, 0)]

    @property
    def token_starts(self) -> jax.Array:
        """[T] absolute position of the first token of the token's row; 0 for padding."""
        return jnp.where(self.is_token, self.starts[jnp.maximum(self.seq_ids, 0)], 0)

    @property
    def row_heads(self) -> jax.Array:
        """[T] flat index of the first token of the token's row."""
        return self.cu_q_lens[jnp.maximum(self.seq_ids, 0)]


def layout(
    token_count: int, slots: jax.Array, starts: jax.Array, q_lens: jax.Array
) -> tuple[TokenBatch, jax.Array]:
    """Lay rows out one behind the other in `token_count` places.

    Args:
      token_count: T, static.
      slots, starts, q_lens: int32 [R]; sum(q_lens) <= T.

    Returns:
      A batch whose `token_ids` are zero, and the index of each token within its row, int32 [T].
    """
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    place = jnp.arange(token_count, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens, place, side="right").astype(jnp.int32) - 1
    is_token = place < cu_q_lens[-1]
    row = jnp.where(is_token, row, -1)
    within = jnp.where(is_token, place - cu_q_lens[jnp.maximum(row, 0)], 0)
    batch = TokenBatch(
        token_ids=jnp.zeros(token_count, jnp.int32),
        positions=jnp.where(is_token, starts[jnp.maximum(row, 0)] + within, 0),
        seq_ids=row,
        slots=slots,
        starts=starts,
        cu_q_lens=cu_q_lens,
    )
    return batch, within


def batch_from_chunks(
    chunks: list[tuple[int, int, np.ndarray]], *, token_count: int, rows: int
) -> TokenBatch:
    """A batch built on the host from (slot, start, token ids) triples, for tests and simple loops."""
    pad = rows - len(chunks)
    slots = jnp.array([c[0] for c in chunks] + [0] * pad, jnp.int32)
    starts = jnp.array([c[1] for c in chunks] + [0] * pad, jnp.int32)
    q_lens = jnp.array([len(c[2]) for c in chunks] + [0] * pad, jnp.int32)
    ids = np.concatenate([np.asarray(c[2], np.int32) for c in chunks])
    if len(ids) > token_count:
        raise ValueError(f"{len(ids)} tokens do not fit a bucket of {token_count}")
    batch, _ = _layout(token_count, slots, starts, q_lens)
    return batch.replace(token_ids=jnp.pad(jnp.asarray(ids), (0, token_count - len(ids))))


_layout = partial(jax.jit, static_argnums=0)(layout)
