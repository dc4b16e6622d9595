"""Everything the device keeps between steps. One tree, donated to each step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import Cache, PageGeometry, init_cache


class Proposals(struct.PyTreeNode):
    """The pending draft of every slot, G tokens each, made at the end of the step before."""

    lens: jax.Array  # [slots] int32, G or 0 where nothing was drafted
    tokens: jax.Array  # [slots, G] int32
    shaped: jax.Array  # [slots, G, V] float32, logits whose softmax each token was drawn from
    logprobs: jax.Array  # [slots, G] float32, log q of each token under the request's own sampling
    confidences: jax.Array  # [slots, G] float32, conditional


class TokenCounts(struct.PyTreeNode):
    """What penalties look at."""

    output: jax.Array  # [slots, V] int32, occurrences in the output
    prompt: jax.Array  # [slots, V] bool, presence in the prompt


def set_counts(
    counts: TokenCounts, slot: jax.Array, output: jax.Array, prompt: jax.Array
) -> TokenCounts:
    """`counts` with int32 [V] and bool [V] in the place of what int32 scalar `slot` had."""
    return TokenCounts(
        output=counts.output.at[slot].set(output), prompt=counts.prompt.at[slot].set(prompt)
    )


class DecodeState(struct.PyTreeNode):
    """Per slot. `positions` counts the tokens that are fed and kept; the anchor stands at that position."""

    cache: Cache
    positions: jax.Array  # [slots] int32
    anchors: jax.Array  # [slots] int32, last token drawn, not fed yet
    ended: jax.Array  # [slots] bool
    counts: TokenCounts
    draft_window: jax.Array | None  # [stages, slots, W, D] plain ring of the drafter's context rows
    proposals: Proposals | None
    synthetic: jax.Array | None = None  # [G + 4] float32, `synthetic.pack_profile`; for benchmarks


def init_state(
    cfg: ModelConfig,
    *,
    slots: int,
    geometry: PageGeometry,
    with_drafter: bool,
    dtype: Any = jnp.float32,
    row_format: RowFormat = RowFormat.PLAIN,
    fill: float = 0.0,
    synthetic: np.ndarray | None = None,
) -> DecodeState:
    """State of `slots` empty slots, the target's cache rows in `row_format` and plain rows in `dtype`.

    The drafter's ring is plain in every format: it is small, no kernel reads it, and how drafts round does not
    change what is emitted, only how much is accepted. `fill` poisons the caches, for tests. `synthetic` is the
    profile that `Method.SYNTHETIC` accepts by.
    """
    v = cfg.vocab_size
    window = proposals = None
    if with_drafter:
        assert cfg.draft is not None
        g = cfg.draft.block_size
        shape = (cfg.draft.num_stages, slots, cfg.sliding_window, cfg.head_dim)
        window = jnp.full(shape, fill, dtype)
        proposals = Proposals(
            lens=jnp.zeros(slots, jnp.int32),
            tokens=jnp.zeros((slots, g), jnp.int32),
            shaped=jnp.zeros((slots, g, v), jnp.float32),
            logprobs=jnp.zeros((slots, g), jnp.float32),
            confidences=jnp.ones((slots, g), jnp.float32),
        )
    return DecodeState(
        cache=init_cache(
            cfg, slots=slots, geometry=geometry, dtype=dtype, row_format=row_format, fill=fill
        ),
        positions=jnp.zeros(slots, jnp.int32),
        anchors=jnp.zeros(slots, jnp.int32),
        ended=jnp.ones(slots, bool),
        counts=TokenCounts(
            output=jnp.zeros((slots, v), jnp.int32), prompt=jnp.zeros((slots, v), bool)
        ),
        draft_window=window,
        proposals=proposals,
        synthetic=None if synthetic is None else jnp.asarray(synthetic, jnp.float32),
    )
