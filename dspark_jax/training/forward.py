"""The target over whole sequences, differentiable: the model of `dspark_jax.model` without caches.

A batch is a rectangle [B, S] of sequences that begin at position 0; layers of one pattern are scanned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import AttentionKind, LayerKind, ModelConfig, RouterKind
from dspark_jax.kernels.norm import rms_norm
from dspark_jax.model import hyper
from dspark_jax.model.params import Block, Compressor, Indexer, Params, Spec, param_specs
from dspark_jax.training.attention import attention
from dspark_jax.training.layers import collapse, enter, experts, leave, mix, wide_linear


class SequenceOutput(struct.PyTreeNode):
    """Result of one pass over B sequences of S tokens."""

    hidden: jax.Array  # [B, S, M] after the final norm: input of the output head
    taps: jax.Array | None  # [B, S, taps, M] stream means after the drafter's target layers
    expert_loads: jax.Array  # [L, E] share of the routed tokens, float32, each row sums to 1
    index_kl: jax.Array  # [CSA layers] divergence of the indexer from attention, nats per token


class Frame(NamedTuple):
    """What every layer of a pass shares."""

    token_ids: jax.Array  # [B, S]
    positions: jax.Array  # [1, S]
    select: jax.Array  # scalar bool: CSA layers attend to the indexer's choice, not to all entries
    fused: bool  # Sinkhorn as a GPU kernel


def cast_params(params: Any, specs: Any, dtype: Any) -> Any:
    """A parameter tree for computing in `dtype`; what checkpoints keep in float32 or integers is left alone."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, Spec))
    values = treedef.flatten_up_to(params)
    kept = [v if s.storage in ("f32", "i64") else v.astype(dtype) for s, v in zip(leaves, values)]
    return treedef.unflatten(kept)


def forward(
    params: Params,
    cfg: ModelConfig,
    token_ids: jax.Array,
    *,
    select: bool | jax.Array = True,
    fused: bool = False,
    tap_layers: tuple[int, ...] = (),
) -> SequenceOutput:
    """Run the target over token_ids int [B, S].

    Args:
      params: plain arrays; computes in the dtype of `params.embed`, streams included.
      select: whether CSA layers attend only to the indexer's `index_topk` entries, as inference does.
      fused: run the Sinkhorn iterations as a GPU kernel.
      tap_layers: layers whose outputs, averaged over the streams, are returned.

    S must be a multiple of the sliding window; pad on the right, which changes nothing to the left.
    """
    length = token_ids.shape[1]
    if length % cfg.sliding_window:
        raise ValueError(
            f"sequence length {length} is not a multiple of the window {cfg.sliding_window}"
        )
    frame = Frame(token_ids, jnp.arange(length)[None], jnp.asarray(select), fused)
    streams = hyper.spread(params.embed[token_ids], cfg.hc_mult)
    loads, divergences, taps = [], [], []
    first = 0
    for segment in cfg.segments:
        width = len(segment.pattern)
        stop = first + segment.count * width
        stacks = _stacks(params, cfg, first, stop, segment.count)

        def repetition(streams, layers, pattern=segment.pattern):
            measured, outputs = [], []
            for j, kind in enumerate(pattern):
                streams, load, kl = _layer(streams, layers, j, kind, cfg, frame)
                measured.append((load, kl))
                outputs.append(jnp.mean(streams, axis=2, dtype=jnp.float32).astype(streams.dtype))
            # Only layers that feed the drafter are worth keeping.
            return streams, (measured, outputs if tap_layers else None)

        streams, (measured, outputs) = jax.lax.scan(repetition, streams, stacks)
        for i in range(segment.count):
            for j in range(width):
                load, kl = measured[j]
                loads.append(load[i])
                if kl is not None:
                    divergences.append(kl[i])
                if first + i * width + j in tap_layers:
                    assert outputs is not None
                    taps.append(outputs[j][i])
        first = stop
    hidden = collapse(streams, params.hyper_head, cfg)
    return SequenceOutput(
        hidden=rms_norm(hidden, params.g_norm, cfg.rms_norm_eps),
        taps=jnp.stack(taps, axis=2) if taps else None,
        expert_loads=jnp.stack(loads),
        index_kl=jnp.stack(divergences) if divergences else jnp.zeros((0,), jnp.float32),
    )


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Output head: hidden [..., M] -> float32 [..., V]."""
    return wide_linear(hidden, params.head)


class _Layers(NamedTuple):
    """Parameters of `count` repetitions of a pattern, one leading axis for the scan."""

    blocks: list[Block]
    csa: Compressor | None
    indexer: Indexer | None
    hca: Compressor | None
    tables: list[jax.Array | None]

    def compressors(self, kind: AttentionKind) -> tuple[Compressor | None, Indexer | None]:
        """What a layer of this kind compresses its rows and chooses among its entries with."""
        if kind is AttentionKind.CSA:
            return self.csa, self.indexer
        return (self.hca if kind is AttentionKind.HCA else None), None


def _stacks(params: Params, cfg: ModelConfig, first: int, stop: int, count: int) -> _Layers:
    """Layers first ... stop of the stacks, regrouped for a scan over `count` repetitions."""
    width = (stop - first) // count

    def every(tree: Any, start: int, step: int) -> Any:
        return jax.tree.map(lambda x: x[start:][::step][:count], tree)

    def own(kind: AttentionKind, tree: Any) -> Any:
        kinds = cfg.attention_kinds
        if kind not in kinds[first:stop]:
            return None
        per_repetition = kinds[first : first + width].count(kind)
        if per_repetition != 1:
            raise ValueError(f"{per_repetition} {kind.value} layers in one repetition; expected 1")
        return every(tree, kinds[:first].count(kind), 1)

    hashed = [layer < cfg.num_hash_layers for layer in range(first, first + width)]
    return _Layers(
        blocks=[every(params.blocks, first + j, width) for j in range(width)],
        csa=own(AttentionKind.CSA, params.csa),
        indexer=own(AttentionKind.CSA, params.indexer),
        hca=own(AttentionKind.HCA, params.hca),
        tables=[
            every(params.tid2eid, first + j, width) if h else None for j, h in enumerate(hashed)
        ],
    )


def _layer(
    streams: jax.Array, layers: _Layers, j: int, kind: LayerKind, cfg: ModelConfig, frame: Frame
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One layer: new streams [B, S, N, M], expert loads [E], divergence of the indexer if there is one."""
    block = layers.blocks[j]
    with jax.named_scope(f"attention_{kind.attention.value}"):
        weights = mix(streams, block.hyper_attn, cfg, fused=frame.fused)
        h = rms_norm(enter(streams, weights), block.g_attn, cfg.rms_norm_eps)
        compressor, indexer = layers.compressors(kind.attention)
        out, kl = attention(
            h,
            block,
            kind.attention,
            compressor,
            indexer,
            cfg,
            positions=frame.positions,
            select=frame.select,
        )
        streams = leave(streams, out, weights)
    with jax.named_scope("experts"):
        weights = mix(streams, block.hyper_ffn, cfg, fused=frame.fused)
        h = rms_norm(enter(streams, weights), block.g_ffn, cfg.rms_norm_eps)
        if kind.router is RouterKind.HASH:
            table = layers.tables[j]
            assert table is not None
            chosen = table[frame.token_ids]
            chosen = jax.nn.one_hot(chosen, cfg.n_routed_experts, dtype=bool).any(axis=-2)
        else:
            chosen = None
        out, load = experts(h, block, cfg, chosen=chosen)
        streams = leave(streams, out, weights)
    return streams, load, kl


def trainable_specs(cfg: ModelConfig) -> Params:
    """Specifications of what training changes: everything but the hash table."""
    return param_specs(cfg).replace(tid2eid=None)
