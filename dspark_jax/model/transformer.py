"""The target over flat tokens: token ids to final hidden states, the drafter's features, and the step's rows.

Layers are executed as few scans over repeating patterns (`ModelConfig.attention_segments`). Weights and caches are
read from whole stacks by layer index; the caches that a step writes are carries of the scan.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.kernels.rows import Keys, Rows
from dspark_jax.model import attention as attn
from dspark_jax.model import hyper, moe
from dspark_jax.model.batch import TokenBatch
from dspark_jax.model.cache import Cache, StepRows
from dspark_jax.model.layers import linear_f32
from dspark_jax.model.params import (
    Block,
    Params,
    layer_block,
    layer_compressor,
    layer_indexer,
)


class Forward(struct.PyTreeNode):
    """Result of one pass over a batch."""

    hidden: jax.Array  # [T, M] after the final norm: input of the output head
    taps: jax.Array | None  # [T, taps, M] stream means after the drafter's target layers
    rows: StepRows  # to be committed once it is known what was accepted
    cache: Cache  # with the entries of windows that closed in this step


class _Carry(NamedTuple):
    streams: jax.Array  # [T, N, M]
    taps: jax.Array | None  # [taps + 1, T, M]
    csa_entries: Rows | None
    index_keys: Keys | None
    hca_entries: Rows | None


class _Rows(NamedTuple):
    """Rows of one layer; None where its kind has none."""

    window: jax.Array
    main_open: jax.Array | None
    index_open: jax.Array | None


def forward(
    params: Params,
    cfg: ModelConfig,
    batch: TokenBatch,
    cache: Cache,
    page_table: jax.Array,
    *,
    dispatch: Dispatch,
    tap_layers: tuple[int, ...] = (),
) -> Forward:
    """Run the target over a batch.

    Args:
      batch: T flat tokens. cache: rings of committed tokens, pages. page_table: int32 [slots, max_pages].
      tap_layers: layers whose outputs, averaged over the streams, are returned for the drafter.

    Returns:
      See `Forward`. Hidden states of padding are finite and without meaning.
    """
    streams = hyper.spread(params.embed[batch.token_ids], cfg.hc_mult)
    tokens, width = streams.shape[0], cfg.hidden_size
    # One more than wanted: where the layers write that nobody reads.
    taps = jnp.zeros((len(tap_layers) + 1, tokens, width), streams.dtype) if tap_layers else None
    carry = _Carry(streams, taps, cache.csa_entries, cache.index_keys, cache.hca_entries)
    frame = attn.make_frame(batch, cache, page_table, cfg, streams.dtype, dispatch)
    tap_index = np.full(cfg.num_hidden_layers, len(tap_layers), np.int32)
    tap_index[list(tap_layers)] = np.arange(len(tap_layers))
    kind_index = _index_within_kind(cfg)

    collected: list[tuple[tuple[AttentionKind, ...], tuple[_Rows, ...]]] = []
    first = 0
    for segment in cfg.attention_segments:
        width = len(segment.pattern)

        def repetition(carry, i, segment=segment, first=first, width=width):
            rows = []
            for j, kind in enumerate(segment.pattern):
                layer = first + i * width + j
                carry, layer_rows = _layer(
                    params, cfg, kind, carry, cache, frame, layer, jnp.asarray(kind_index)[layer]
                )
                if carry.taps is not None:
                    place = jnp.asarray(tap_index)[layer]
                    mean = jnp.mean(carry.streams, axis=1, dtype=jnp.float32)
                    tapped = jax.lax.dynamic_update_index_in_dim(
                        carry.taps, mean.astype(carry.taps.dtype), place, axis=0
                    )
                    carry = carry._replace(taps=tapped)
                rows.append(layer_rows)
            return carry, tuple(rows)

        carry, rows = jax.lax.scan(repetition, carry, jnp.arange(segment.count))
        collected.append((segment.pattern, rows))
        first += segment.count * width

    with jax.named_scope("final_norm"):
        hidden = hyper.collapse(carry.streams, params.hyper_head, cfg)
        hidden = rms_norm(hidden, params.g_norm, cfg.rms_norm_eps)
    return Forward(
        hidden=hidden,
        taps=None if carry.taps is None else jnp.moveaxis(carry.taps[:-1], 0, 1),
        rows=_stack_rows(cfg, collected),
        cache=cache.replace(
            csa_entries=carry.csa_entries,
            index_keys=carry.index_keys,
            hca_entries=carry.hca_entries,
        ),
    )


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Output head: hidden [..., M] -> float32 [..., V]."""
    return linear_f32(hidden, params.head)


def _layer(
    params: Params,
    cfg: ModelConfig,
    kind: AttentionKind,
    carry: _Carry,
    cache: Cache,
    frame: attn.Frame,
    layer: jax.Array,
    own: jax.Array,
) -> tuple[_Carry, _Rows]:
    """One layer. `layer` counts all layers, `own` the layers of the same attention kind."""
    dispatch, stack = frame.dispatch, params.blocks
    block = layer_block(stack, layer, dispatch)
    with jax.named_scope(f"attention_{kind.value}"):
        entered = hyper.enter(
            carry.streams, stack.hyper_attn, stack.g_attn, layer=layer, cfg=cfg, dispatch=dispatch
        )
        out, carry, rows = _attention(
            params, cfg, kind, entered.block_input, block, carry, cache, frame, layer, own
        )
        streams = hyper.leave(carry.streams, out, entered, dispatch=dispatch)
    with jax.named_scope("experts"):
        entered = hyper.enter(
            streams, stack.hyper_ffn, stack.g_ffn, layer=layer, cfg=cfg, dispatch=dispatch
        )
        h = entered.block_input
        expert_ids, weights = moe.choose_experts(
            h,
            block,
            stack,
            layer=layer,
            is_token=frame.batch.is_token,
            table=params.tid2eid,
            token_ids=None if params.tid2eid is None else frame.batch.token_ids,
            cfg=cfg,
            dispatch=dispatch,
        )
        out = moe.expert_block(
            h,
            expert_ids,
            weights,
            block,
            stack,
            layer=layer,
            cfg=cfg,
            dispatch=dispatch,
        )
        streams = hyper.leave(streams, out, entered, dispatch=dispatch)
    return carry._replace(streams=streams), rows


def _attention(
    params: Params,
    cfg: ModelConfig,
    kind: AttentionKind,
    h: jax.Array,
    block: Block,
    carry: _Carry,
    cache: Cache,
    frame: attn.Frame,
    layer: jax.Array,
    own: jax.Array,
) -> tuple[jax.Array, _Carry, _Rows]:
    """Attention block of one kind: output [T, M], carry with new entries, the layer's rows."""
    positions = frame.batch.positions
    q, latent = attn.query_heads(h, block, cfg)
    rows = attn.window_rows(
        h,
        block,
        params.blocks.g_kv,
        cache.window,
        frame,
        layer=layer,
        kind=kind,
        eps=cfg.rms_norm_eps,
    )
    main_open = index_open = entries = places = counts = None
    if kind is AttentionKind.CSA:
        assert carry.csa_entries is not None and cache.csa_open is not None
        assert frame.csa is not None
        assert carry.index_keys is not None and cache.index_open is not None
        assert params.csa is not None and params.indexer is not None
        weights = layer_compressor(params.csa, own, frame.dispatch)
        indexer = layer_indexer(params.indexer, own, frame.dispatch)
        main_open = attn.open_row(h, weights, positions)
        index_open = attn.open_row(h, indexer.compressor, positions)
        entries = attn.write_entries(
            carry.csa_entries,
            main_open,
            cache.csa_open,
            params.csa,
            frame.csa,
            frame,
            layer=own,
            cfg=cfg,
        )
        index_keys = attn.write_entries(
            carry.index_keys,
            index_open,
            cache.index_open,
            params.indexer.compressor,
            frame.csa,
            frame,
            layer=own,
            cfg=cfg,
        )
        carry = carry._replace(csa_entries=entries, index_keys=index_keys)
        places, counts = attn.choose_entries(
            h, latent, index_keys, indexer, frame, layer=own, cfg=cfg
        )
    elif kind is AttentionKind.HCA:
        assert carry.hca_entries is not None and cache.hca_open is not None
        assert frame.hca is not None
        assert params.hca is not None
        weights = layer_compressor(params.hca, own, frame.dispatch)
        main_open = attn.open_row(h, weights, positions)
        entries = attn.write_entries(
            carry.hca_entries,
            main_open,
            cache.hca_open,
            params.hca,
            frame.hca,
            frame,
            layer=own,
            cfg=cfg,
        )
        carry = carry._replace(hca_entries=entries)
        places, counts = frame.hca_places, frame.hca.visible
    out = attn.attend(
        q,
        rows,
        cache.window,
        block,
        frame,
        layer=layer,
        kind=kind,
        norm_eps=cfg.rms_norm_eps,
        entries=entries,
        entry_layer=own,
        places=places,
        counts=counts,
    )
    out = attn.project_heads(out, block, cfg)
    return out, carry, _Rows(rows, main_open, index_open)


def _index_within_kind(cfg: ModelConfig) -> np.ndarray:
    """Of each layer, how many layers of the same attention kind come before it. int32 [L]."""
    kinds = cfg.attention_kinds
    return np.array([kinds[:i].count(kind) for i, kind in enumerate(kinds)], np.int32)


def _stack_rows(cfg: ModelConfig, collected) -> StepRows:
    """Rows of all segments, brought back into layer order per kind."""

    def gather(field: str, kind: AttentionKind | None) -> jax.Array | None:
        parts = []
        for pattern, rows in collected:
            chosen = [getattr(r, field) for own, r in zip(pattern, rows) if kind in (None, own)]
            if chosen:
                # [count, in pattern, T, ...] flattened to layer order.
                stacked = jnp.stack(chosen, axis=1)
                parts.append(stacked.reshape(-1, *stacked.shape[2:]))
        return jnp.concatenate(parts) if parts else None

    window = gather("window", None)
    assert window is not None
    return StepRows(
        window=window,
        csa_open=gather("main_open", AttentionKind.CSA),
        index_open=gather("index_open", AttentionKind.CSA),
        hca_open=gather("main_open", AttentionKind.HCA),
    )
