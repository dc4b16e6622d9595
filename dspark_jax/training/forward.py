"""The target over whole sequences, differentiable: the model of `dspark_jax.model` without caches.

A batch is a rectangle [B, S] of sequences that begin at position 0. Attention is computed densely, in chunks of
one window plus all visible compressed entries; every expert sees every token and unrouted ones get weight zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import AttentionKind, LayerKind, ModelConfig, RouterKind
from dspark_jax.model import hyper
from dspark_jax.model.attention import has_compressor, latent_rows, project_output, queries
from dspark_jax.model.layers import clamped_swiglu, linear, rms_norm, rotary_frequencies, rotate
from dspark_jax.model.params import (
    Block,
    Compressor,
    Hyper,
    HyperHead,
    Indexer,
    Params,
    Spec,
    param_specs,
)
from dspark_jax.training.sinkhorn import fused_sinkhorn

_MASKED = -1e30


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
        out, kl = _attention(h, block, layers, kind.attention, cfg, frame)
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


def mix(streams: jax.Array, weights: Hyper, cfg: ModelConfig, *, fused: bool) -> hyper.Mix:
    """`dspark_jax.model.hyper.mix` with the projection in the dtype of the streams and a choice of Sinkhorn."""
    n = cfg.hc_mult
    z = _normed_projection(streams, weights.w_fn, cfg.rms_norm_eps)
    pre, post, comb = jnp.split(z, [n, 2 * n], axis=-1)
    b_pre, b_post, b_comb = jnp.split(weights.base, [n, 2 * n])
    comb = (comb * weights.scale[2] + b_comb).reshape(*comb.shape[:-1], n, n)
    normalise = fused_sinkhorn if fused else hyper.sinkhorn
    return hyper.Mix(
        pre=jax.nn.sigmoid(pre * weights.scale[0] + b_pre) + cfg.hc_eps,
        post=2 * jax.nn.sigmoid(post * weights.scale[1] + b_post),
        comb=normalise(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps),
    )


def enter(streams: jax.Array, weights: hyper.Mix) -> jax.Array:
    """`hyper.enter`, elementwise: a batched product of 4 x 4 matrices is slow on a GPU."""
    wide = streams.astype(jnp.float32)
    return jnp.sum(weights.pre[..., None] * wide, axis=-2).astype(streams.dtype)


def leave(streams: jax.Array, output: jax.Array, weights: hyper.Mix) -> jax.Array:
    """`hyper.leave`, elementwise."""
    wide = streams.astype(jnp.float32)
    mixed = jnp.sum(weights.comb[..., None] * wide[..., :, None, :], axis=-3)
    added = weights.post[..., None] * output.astype(jnp.float32)[..., None, :]
    return (mixed + added).astype(streams.dtype)


def collapse(streams: jax.Array, head: HyperHead, cfg: ModelConfig) -> jax.Array:
    """`hyper.collapse`, elementwise, with the projection in the dtype of the streams."""
    z = _normed_projection(streams, head.w_fn, cfg.rms_norm_eps)
    weights = jax.nn.sigmoid(z * head.scale + head.base) + cfg.hc_eps
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=-2).astype(streams.dtype)


def _normed_projection(streams: jax.Array, w_fn: jax.Array, eps: float) -> jax.Array:
    flat = streams.reshape(*streams.shape[:-2], -1)
    mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
    return wide_linear(flat, w_fn) * jax.lax.rsqrt(mean_square + eps)


def wide_linear(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [..., K] times the transpose of matrix [N, K] with a float32 result; operands in the dtype of x."""
    return jnp.einsum(
        "...k,nk->...n",
        x,
        matrix.astype(x.dtype),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )


def experts(
    h: jax.Array, block: Block, cfg: ModelConfig, *, chosen: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Expert block of h [..., M]: output [..., M] and loads [E].

    `chosen` bool [..., E] fixes the experts; by default the router's scores and bias choose, ties to the lowest.
    """
    scores = jnp.sqrt(jax.nn.softplus(wide_linear(h, block.w_router)))
    if chosen is None:
        chosen = _top(jax.lax.stop_gradient(scores) + block.b_router, cfg.num_experts_per_tok)
    kept = jnp.where(chosen, scores, 0.0)
    gates = kept / (jnp.sum(kept, axis=-1, keepdims=True) + 1e-20) * cfg.routed_scaling_factor
    assert isinstance(block.w_gate_up, jax.Array)  # masters are trained, not what is stored of them
    e, two_f, m = block.w_gate_up.shape
    both = linear(h, block.w_gate_up.reshape(e * two_f, m)).reshape(*h.shape[:-1], e, 2, two_f // 2)
    acted = clamped_swiglu(both[..., 0, :], both[..., 1, :], cfg.swiglu_limit)
    acted = (acted.astype(jnp.float32) * gates[..., None]).astype(h.dtype)
    routed = jnp.einsum("...ef,emf->...m", acted, block.w_down, preferred_element_type=jnp.float32)
    gate, up = jnp.split(linear(h, block.w_shared_gate_up), 2, axis=-1)
    shared = linear(clamped_swiglu(gate, up, cfg.swiglu_limit), block.w_shared_down)
    axes = tuple(range(h.ndim - 1))
    loads = jnp.mean(chosen.astype(jnp.float32), axis=axes) / cfg.num_experts_per_tok
    return (routed + shared.astype(jnp.float32)).astype(h.dtype), loads


def _top(scores: jax.Array, count: int) -> jax.Array:
    """Which of a few scores [..., E] are the `count` highest, ties to the lowest index: bool [..., E]."""
    index = np.arange(scores.shape[-1])
    mine, other = scores[..., :, None], scores[..., None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return jnp.sum(ahead, axis=-1) < count


def _attention(
    h: jax.Array,
    block: Block,
    layers: _Layers,
    kind: AttentionKind,
    cfg: ModelConfig,
    frame: Frame,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention block of h [B, S, M]: output [B, S, M] and the indexer's divergence if it has one."""
    frequencies = rotary_frequencies(cfg, compressed=has_compressor(kind))
    q, latent = queries(h, block, frame.positions, frequencies, cfg)
    rows = latent_rows(h, block, frame.positions, frequencies, cfg.rms_norm_eps)
    entries = visible = index_scores = kl = None
    if kind is AttentionKind.CSA:
        assert layers.csa is not None
        assert layers.indexer is not None
        entries = pool_entries(h, layers.csa, cfg)
        visible = _visible(frame.positions, cfg.csa_ratio, entries.shape[1])
        index_scores = _index_scores(h, latent, layers.indexer, cfg, frame)
        index_scores = jnp.where(visible, index_scores, _MASKED)
        threshold = jax.lax.cond(
            frame.select,
            lambda s: kth_largest(s, cfg.index_topk),
            lambda s: jnp.full(s.shape[:-1], _MASKED),
            jax.lax.stop_gradient(index_scores),
        )
        visible = visible & (index_scores >= threshold[..., None])
    elif kind is AttentionKind.HCA:
        assert layers.hca is not None
        entries = pool_entries(h, layers.hca, cfg)
        visible = _visible(frame.positions, cfg.hca_ratio, entries.shape[1])
    out, mass = _attend(q, rows, entries, visible, block.attn_sink, cfg.sliding_window)
    if index_scores is not None:
        assert mass is not None
        assert visible is not None
        kl = _divergence(jax.lax.stop_gradient(mass), index_scores, visible)
    return project_output(out, block, frame.positions, frequencies, cfg), kl


def pool_entries(h: jax.Array, weights: Compressor, cfg: ModelConfig) -> jax.Array:
    """Compressed entries [B, S // m, D] of h [B, S, M]; the tokens of an unfinished window give none."""
    ratio, width = weights.ape.shape[0], weights.g_norm.shape[0]
    windows = h.shape[1] // ratio
    whole = h[:, : windows * ratio]
    values = wide_linear(whole, weights.w_kv).reshape(len(h), windows, ratio, -1)
    gates = wide_linear(whole, weights.w_gate).reshape(len(h), windows, ratio, -1) + weights.ape
    if values.shape[-1] == 2 * width:
        # The first half of a token's channels belongs to the window after its own; window 0 has none before it.
        before = ((0, 0), (1, 0), (0, 0), (0, 0))
        late_values = jnp.pad(values[:, :-1, :, :width], before)
        late_gates = jnp.pad(gates[:, :-1, :, :width], before, constant_values=_MASKED)
        values = jnp.concatenate([late_values, values[..., width:]], axis=2)
        gates = jnp.concatenate([late_gates, gates[..., width:]], axis=2)
    pooled = jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)
    entries = rms_norm(pooled, weights.g_norm, cfg.rms_norm_eps)
    starts = jnp.arange(windows)[None] * ratio
    return rotate(entries, starts, rotary_frequencies(cfg, compressed=True)).astype(h.dtype)


def _visible(positions: jax.Array, ratio: int, entries: int) -> jax.Array:
    """Entry w is seen from the token that closes its window on: bool [1, S, W]."""
    return jnp.arange(entries) < ((positions + 1) // ratio)[..., None]


def _index_scores(
    h: jax.Array, latent: jax.Array, indexer: Indexer, cfg: ModelConfig, frame: Frame
) -> jax.Array:
    """Indexer scores float32 [B, S, W] of every entry; no gradient reaches the inputs."""
    h, latent = jax.lax.stop_gradient((h, latent))
    frequencies = rotary_frequencies(cfg, compressed=True)
    q = linear(latent, indexer.w_q_b)
    q = q.reshape(*q.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
    q = rotate(q, frame.positions, frequencies)
    keys = pool_entries(h, indexer.compressor, cfg)
    heads = wide_linear(h, indexer.w_heads) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    products = jax.nn.relu(jnp.einsum("bshi,bwi->bshw", q, keys))
    return jnp.sum(products.astype(jnp.float32) * heads[..., None], axis=2)


def kth_largest(scores: jax.Array, k: int) -> jax.Array:
    """The k-th largest of float32 scores [..., W] -> [...], exactly, by bisection on the bits of the values.

    Sorting is many times slower on a GPU. With fewer than k scores the smallest possible value comes out.
    """
    if scores.shape[-1] <= k:
        return jnp.full(scores.shape[:-1], _MASKED)
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    # Floats as integers of the same order: flip the magnitude of negatives.
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def halve(_, bounds):
        low, high = bounds  # low is reached by k scores, high is not
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.sum(ordered >= middle[..., None], axis=-1) >= k
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.full(scores.shape[:-1], jnp.iinfo(jnp.int32).min)
    high = jnp.full(scores.shape[:-1], jnp.iinfo(jnp.int32).max)
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(jnp.where(low < 0, low ^ 0x7FFFFFFF, low), jnp.float32)


def _attend(
    q: jax.Array,
    rows: jax.Array,
    entries: jax.Array | None,
    visible: jax.Array | None,
    sink: jax.Array,
    window: int,
) -> tuple[jax.Array, jax.Array | None]:
    """One softmax over the sliding window, the visible entries and the sink.

    q [B, S, H, D], rows [B, S, D], entries [B, W, D], visible bool [B or 1, S, W]. Returns the output
    [B, S, H, D] and each entry's probability summed over heads, float32 [B, S, W].
    """
    batch, length, heads, width = q.shape
    chunks = length // window
    scale = width**-0.5
    near = rows.reshape(batch, chunks, window, width)
    before = jnp.pad(near[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    keys = jnp.concatenate([before, near], axis=2)
    chunked = q.reshape(batch, chunks, window, heads, width)
    near_logits = scale * jnp.einsum(
        "bcqhd,bckd->bcqhk", chunked, keys, preferred_element_type=jnp.float32
    )
    age = np.arange(window)[:, None] + window - np.arange(2 * window)[None]
    seen = (age >= 0) & (age < window)
    first = seen & (np.arange(2 * window) >= window)
    seen = np.stack([first] + [seen] * (chunks - 1))[None, :, :, None, :]
    near_logits = jnp.where(seen, near_logits, _MASKED).reshape(batch, length, heads, 2 * window)
    top = jnp.maximum(jnp.max(near_logits, axis=-1), sink)
    if entries is not None:
        assert visible is not None
        far_logits = scale * jnp.einsum(
            "bshd,bwd->bshw", q, entries, preferred_element_type=jnp.float32
        )
        far_logits = jnp.where(visible[:, :, None, :], far_logits, _MASKED)
        top = jnp.maximum(top, jnp.max(far_logits, axis=-1))
    top = jax.lax.stop_gradient(top)
    near_weights = jnp.exp(near_logits - top[..., None])
    total = jnp.sum(near_weights, axis=-1) + jnp.exp(sink - top)
    out = jnp.einsum(
        "bcqhk,bckd->bcqhd",
        near_weights.astype(q.dtype).reshape(batch, chunks, window, heads, 2 * window),
        keys,
        preferred_element_type=jnp.float32,
    ).reshape(batch, length, heads, width)
    mass = None
    if entries is not None:
        far_weights = jnp.exp(far_logits - top[..., None])
        total = total + jnp.sum(far_weights, axis=-1)
        out = out + jnp.einsum(
            "bshw,bwd->bshd",
            far_weights.astype(q.dtype),
            entries,
            preferred_element_type=jnp.float32,
        )
        mass = jnp.sum(far_weights / total[..., None], axis=2)
    return (out / total[..., None]).astype(q.dtype), mass


def _divergence(mass: jax.Array, scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Mean KL from attention's distribution over entries [B, S, W] to the softmax of the indexer's scores."""
    target = mass / (jnp.sum(mass, axis=-1, keepdims=True) + 1e-20)
    predicted = jax.nn.log_softmax(jnp.where(visible, scores, _MASKED), axis=-1)
    terms = target * (jnp.log(target + 1e-20) - predicted)
    return jnp.sum(jnp.where(visible, terms, 0.0)) / (mass.shape[0] * mass.shape[1])


def trainable_specs(cfg: ModelConfig) -> Params:
    """Specifications of what training changes: everything but the hash table."""
    return param_specs(cfg).replace(tid2eid=None)
