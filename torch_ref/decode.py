"""Decoding one request with caches that forget rejected tokens by themselves.

Every cached tensor is addressed by position: a row at position p lives in slot ``p % ring``, an
entry over window w in slot w. What a query sees depends on its own position alone, and whatever
lies at or after the committed length is written again before it is seen. Rolling back is
therefore nothing but setting the length. Rings are just large enough that no row still needed is
overwritten by the tokens of one step, accepted or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ref.attention import (
    attend,
    entry_mask,
    layer_frequencies,
    pool_entries,
    pool_index_keys,
    project_output,
    project_queries,
    project_rows,
    raw_rows,
    select_entries,
    window_mask,
)
from torch_ref.config import CSA, SLIDING, TorchRefConfig
from torch_ref.model import forward, run_layers
from torch_ref.quantization import Simulation
from torch_ref.scope import Scope


@dataclass
class EntryCache:
    """Pooled entries of one compressor and the raw rows they are pooled from.

    ``raw [ring, 2 * k * D_c]`` by position, ``entries [max_len // m, D_c]`` by window.
    """

    raw: Tensor
    entries: Tensor


@dataclass
class LayerCache:
    """State of one layer: key rows ``[ring, D]``, and compressor caches where it has any."""

    rows: Tensor
    attention: EntryCache | None = None
    index: EntryCache | None = None


@dataclass
class DecodeCache:
    """State of one request.

    ``length`` tokens are committed; ``oldest`` is the smallest length that rings still allow.
    """

    layers: list[LayerCache]
    max_len: int
    max_step: int
    length: int = 0
    oldest: int = 0


def new_cache(cfg: TorchRefConfig, max_len: int, max_step: int) -> DecodeCache:
    """Empty cache for at most ``max_len`` tokens, appended at most ``max_step`` at a time.

    Tensors are filled with NaN, so that reading a slot nobody wrote cannot go unnoticed.
    """

    def unwritten(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan)

    def entry_cache(ratio: int, halves: int, width: int) -> EntryCache:
        ring = halves * ratio - 1 + max_step
        return EntryCache(unwritten(ring, 2 * halves * width), unwritten(max_len // ratio, width))

    layers = []
    for layer, ratio in enumerate(cfg.compress_ratios):
        cache = LayerCache(unwritten(cfg.sliding_window - 1 + max_step, cfg.head_dim))
        kind = cfg.layer_type(layer)
        if kind != SLIDING:
            cache.attention = entry_cache(ratio, 2 if kind == CSA else 1, cfg.head_dim)
        if kind == CSA:
            cache.index = entry_cache(ratio, 2, cfg.index_head_dim)
        layers.append(cache)
    return DecodeCache(layers, max_len, max_step)


@torch.no_grad()
def step(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    cache: DecodeCache,
    token_ids: Sequence[int],
    start: int,
    *,
    simulate_quantization: bool | Simulation = False,
) -> tuple[Tensor, list[Tensor]]:
    """Append ``token_ids`` at positions ``start ...`` and return logits ``[j, V]`` for each.

    Also returns the states of :func:`torch_ref.model.forward_with_states` for these tokens, each
    ``[1, j, N, C]``. ``start`` must be the committed length. Raises ``ValueError`` where it is
    not, or where the tokens exceed what the cache was made for.
    """
    count = len(token_ids)
    if start != cache.length:
        raise ValueError(f"start={start}, but {cache.length} tokens are committed")
    if not 1 <= count <= cache.max_step or start + count > cache.max_len:
        raise ValueError(
            f"{count} tokens at {start}: the cache takes 1 to {cache.max_step} at a time, "
            f"{cache.max_len} in all"
        )
    scope = Scope(weights, simulation=Simulation.resolve(simulate_quantization))

    def attend_cached(attn: Scope, layer: int, x: Tensor) -> Tensor:
        return _attention(attn, cfg, layer, cache.layers[layer], x, start)

    logits, states = run_layers(scope, cfg, torch.tensor([list(token_ids)]), attend_cached)
    cache.length, cache.oldest = start + count, start
    return logits[0], states


def rollback(cache: DecodeCache, length: int) -> None:
    """Forget all tokens from position ``length`` on, which must lie within the last step."""
    if not cache.oldest <= length <= cache.length:
        raise ValueError(f"length {length} is outside {cache.oldest} ... {cache.length}")
    cache.length = length


def prefill(
    weights: Mapping[str, Tensor],
    cfg: TorchRefConfig,
    cache: DecodeCache,
    token_ids: Sequence[int],
    *,
    simulate_quantization: bool | Simulation = False,
) -> tuple[Tensor, list[Tensor]]:
    """Append a prompt in steps of ``cache.max_step``; results as :func:`step`, joined."""
    if not token_ids:
        raise ValueError("the prompt is empty")
    pieces = [
        step(
            weights,
            cfg,
            cache,
            token_ids[first : first + cache.max_step],
            cache.length,
            simulate_quantization=simulate_quantization,
        )
        for first in range(0, len(token_ids), cache.max_step)
    ]
    logits = torch.cat([logits for logits, _ in pieces])
    states = [torch.cat(parts, dim=1) for parts in zip(*(states for _, states in pieces))]
    return logits, states


def greedy_no_cache(
    weights: Mapping[str, Tensor], cfg: TorchRefConfig, prompt: Sequence[int], n: int
) -> list[int]:
    """Continue ``prompt`` by ``n`` tokens, the whole sequence run anew for each."""
    tokens = list(prompt)
    for _ in range(n):
        logits = forward(weights, cfg, torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _attention(
    scope: Scope, cfg: TorchRefConfig, layer: int, cache: LayerCache, x: Tensor, start: int
) -> Tensor:
    frequencies = layer_frequencies(cfg, layer)
    end = start + x.shape[1]
    positions = torch.arange(start, end)
    latent, queries = project_queries(scope, cfg, x, positions, frequencies)
    _write(cache.rows, positions, project_rows(scope, cfg, x, positions, frequencies)[0])
    window = torch.arange(max(0, start - cfg.sliding_window + 1), end)
    keys = _read(cache.rows, window)[None]
    visible = window_mask(positions, window, cfg.sliding_window)
    if cache.attention is not None:
        ratio = cfg.compress_ratios[layer]
        _update_entries(
            scope.at("compressor"), cfg, cache.attention, pool_entries, x, start, frequencies
        )
        entries = cache.attention.entries[None, : end // ratio]
        if cache.index is not None:
            indexer = scope.at("indexer")
            _update_entries(
                indexer.at("compressor"), cfg, cache.index, pool_index_keys, x, start, frequencies
            )
            index_keys = cache.index.entries[None, : end // ratio]
            chosen = select_entries(indexer, cfg, x, latent, index_keys, positions, frequencies)
        else:
            chosen = entry_mask(positions, ratio, end // ratio)
        keys = torch.cat([keys, entries], dim=1)
        visible = torch.cat([visible, chosen], dim=-1)
    attended = attend(scope, cfg, queries, keys, visible)
    return project_output(scope, cfg, attended, positions, frequencies)


def _update_entries(scope, cfg, cache: EntryCache, pool, x: Tensor, start: int, frequencies):
    """Store the step's raw rows, then pool every window that the step closes."""
    end, ratio = start + x.shape[1], len(scope["ape"])
    positions = torch.arange(start, end)
    _write(cache.raw, positions, raw_rows(scope, x, positions)[0])
    first, last = start // ratio, end // ratio
    if first == last:
        return
    raw = _read(cache.raw, torch.arange(first * ratio, last * ratio))[None]
    previous = None
    overlaps = cache.raw.shape[-1] == 4 * cache.entries.shape[-1]
    if overlaps and first > 0:
        previous = _read(cache.raw, torch.arange((first - 1) * ratio, first * ratio))[None]
    cache.entries[first:last] = pool(scope, cfg, raw, first, frequencies, previous)[0]


def _write(ring: Tensor, positions: Tensor, rows: Tensor) -> None:
    ring[positions % len(ring)] = rows


def _read(ring: Tensor, positions: Tensor) -> Tensor:
    return ring[positions % len(ring)]
