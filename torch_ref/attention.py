"""Attention over a sliding window and compressed entries, in the pieces that caching needs.

Every function takes and returns ``[B, S, ...]`` float32 tensors; ``positions`` is int ``[S]``.
Keys and values are one tensor. A *row* is one token's key; an *entry* is the pooled key of a
whole window of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_ref.config import CSA, SLIDING, TorchRefConfig
from torch_ref.layers import inverse_frequencies, largest_first, rms_norm, rotate
from torch_ref.quantization import round_bfloat16, round_cache_row, round_index_row
from torch_ref.scope import Scope


def layer_frequencies(cfg: TorchRefConfig, layer: int) -> Tensor:
    """Rotary table ``[R/2]`` that everything in a trunk layer uses."""
    return inverse_frequencies(cfg, compressed=cfg.layer_type(layer) != SLIDING)


def project_queries(
    scope: Scope, cfg: TorchRefConfig, x: Tensor, positions: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor]:
    """Query latent ``[B, S, q_lora_rank]``, normed, and rotated queries ``[B, S, H, D]``."""
    latent = rms_norm(scope.quantized_linear("wq_a", x), scope["q_norm.weight"], cfg.rms_norm_eps)
    queries = scope.quantized_linear("wq_b", latent).unflatten(-1, (-1, cfg.head_dim))
    queries = rms_norm(queries, None, cfg.rms_norm_eps)
    return latent, rotate(queries, positions, frequencies)


def project_rows(
    scope: Scope, cfg: TorchRefConfig, x: Tensor, positions: Tensor, frequencies: Tensor
) -> Tensor:
    """Rotated key rows ``[B, S, D]``, as a cache would hold them."""
    rows = rms_norm(scope.quantized_linear("wkv", x), scope["kv_norm.weight"], cfg.rms_norm_eps)
    rows = rotate(rows, positions, frequencies)
    if scope.simulation.cache_rows:
        rows = round_cache_row(rows, cfg.qk_rope_head_dim)
    return rows


def attend(
    scope: Scope, cfg: TorchRefConfig, queries: Tensor, keys: Tensor, visible: Tensor
) -> Tensor:
    """Softmax attention with one sink logit per head in the denominator, without a value.

    ``queries [B, S, H, D]``, ``keys [B, K, D]`` (also the values), ``visible`` bool
    ``[B or 1, S, K]`` with at least one true per query. Returns ``[B, S, H, D]``.
    """
    logits = torch.einsum("bshd,bkd->bshk", queries, keys) * cfg.head_dim**-0.5
    logits = logits.masked_fill(~visible[:, :, None, :], -torch.inf)
    sink = scope["attn_sink"].expand(*logits.shape[:-1]).unsqueeze(-1)
    probabilities = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    if scope.simulation.probabilities:
        probabilities = round_bfloat16(probabilities)
    return torch.einsum("bshk,bkd->bshd", probabilities, keys)


def project_output(
    scope: Scope, cfg: TorchRefConfig, attended: Tensor, positions: Tensor, frequencies: Tensor
) -> Tensor:
    """Undo the rotation that the values carry, then the grouped low-rank output projection."""
    attended = rotate(attended, positions, frequencies, inverse=True)
    groups = attended.flatten(-2).unflatten(-1, (cfg.o_groups, -1))
    w_a = scope["wo_a.weight"].unflatten(0, (cfg.o_groups, cfg.o_lora_rank))
    return scope.quantized_linear("wo_b", torch.einsum("bsgi,gri->bsgr", groups, w_a).flatten(-2))


def window_mask(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """Whether query t sees the row at p, ``t - window < p <= t``: bool ``[1, S, K]``."""
    age = query_positions[:, None] - key_positions[None, :]
    return ((age >= 0) & (age < window))[None]


def raw_rows(scope: Scope, x: Tensor, positions: Tensor) -> Tensor:
    """Per-token input of a compressor, values then gates: ``[B, S, 2 * k * D_c]``.

    The gate includes the learned bias of the token's place in its window. ``k`` is 2 for a CSA
    compressor, whose first half of channels belongs to the *next* window's entry.
    """
    ape = scope["ape"]
    gates = scope.linear("wgate", x) + ape[positions % len(ape)]
    return torch.cat([scope.linear("wkv", x), gates], dim=-1)


def pool_windows(
    scope: Scope,
    cfg: TorchRefConfig,
    raw: Tensor,
    first_window: int,
    frequencies: Tensor,
    previous: Tensor | None = None,
) -> Tensor:
    """Pool whole windows of raw rows into entries ``[B, n, D_c]``.

    ``raw [B, n * m, 2 * k * D_c]`` covers windows ``first_window ...``. Weights are a softmax
    over the tokens, one per channel; each entry is normed and rotated at its window's first
    position. CSA entries (k = 2) also pool the window before; ``previous [B, m, 4 * D_c]`` gives
    the raw rows of the one before ``first_window``, and must be None where that is window 0.
    """
    ratio, width = len(scope["ape"]), len(scope["norm.weight"])
    raw = raw.unflatten(1, (-1, ratio))
    values, gates = raw.chunk(2, dim=-1)
    if values.shape[-1] == 2 * width:
        if previous is None:
            absent = torch.zeros_like(raw[:, :1])
            absent[..., 2 * width :] = -torch.inf
        else:
            absent = previous[:, None]
        values_before, gates_before = torch.cat([absent, raw[:, :-1]], 1).chunk(2, dim=-1)
        values = torch.cat([values_before[..., :width], values[..., width:]], dim=2)
        gates = torch.cat([gates_before[..., :width], gates[..., width:]], dim=2)
    entries = (gates.softmax(dim=2) * values).sum(dim=2)
    entries = rms_norm(entries, scope["norm.weight"], cfg.rms_norm_eps)
    windows = torch.arange(first_window, first_window + entries.shape[1])
    return rotate(entries, windows * ratio, frequencies)


def pool_entries(scope: Scope, cfg: TorchRefConfig, *args, **kwargs) -> Tensor:
    """Attention entries of ``attn.compressor``: :func:`pool_windows`, as a cache holds them."""
    entries = pool_windows(scope, cfg, *args, **kwargs)
    if scope.simulation.cache_rows:
        entries = round_cache_row(entries, cfg.qk_rope_head_dim)
    return entries


def pool_index_keys(scope: Scope, cfg: TorchRefConfig, *args, **kwargs) -> Tensor:
    """Indexer keys of ``attn.indexer.compressor``: :func:`pool_windows`, as a cache holds them."""
    keys = pool_windows(scope, cfg, *args, **kwargs)
    return round_index_row(keys) if scope.simulation.index_rows else keys


def entry_mask(positions: Tensor, ratio: int, num_entries: int) -> Tensor:
    """Whether query t may see entry w, ``w < (t + 1) // ratio``: bool ``[1, S, num_entries]``."""
    return (torch.arange(num_entries) < ((positions + 1) // ratio)[:, None])[None]


def select_entries(
    scope: Scope,
    cfg: TorchRefConfig,
    x: Tensor,
    latent: Tensor,
    keys: Tensor,
    positions: Tensor,
    frequencies: Tensor,
) -> Tensor:
    """Entries that the indexer picks for each query: bool ``[B, S, W]``.

    ``x`` is the attention input, ``latent`` the normed query latent and ``keys [B, W, I]`` the
    indexer keys. Scores are head-weighted sums of ``relu(q . k)``; the ``index_topk`` best of
    the visible entries are kept, ties to the lowest index.
    """
    queries = scope.quantized_linear("wq_b", latent).unflatten(-1, (-1, cfg.index_head_dim))
    queries = rotate(queries, positions, frequencies)
    if scope.simulation.index_rows:
        queries = round_index_row(queries)
    heads = scope.linear("weights_proj", x) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
    scores = torch.einsum("bshi,bwi->bshw", queries, keys).relu()
    scores = torch.einsum("bshw,bsh->bsw", scores, heads)
    visible = entry_mask(positions, cfg.csa_compress_ratio, keys.shape[1])
    chosen = largest_first(scores.masked_fill(~visible, -torch.inf), cfg.index_topk)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & visible


def attention(
    scope: Scope, cfg: TorchRefConfig, layer: int, x: Tensor, positions: Tensor
) -> Tensor:
    """Attention block of a trunk layer over a whole sequence ``x [B, S, C]`` from position 0."""
    frequencies = layer_frequencies(cfg, layer)
    latent, queries = project_queries(scope, cfg, x, positions, frequencies)
    keys = project_rows(scope, cfg, x, positions, frequencies)
    visible = window_mask(positions, positions, cfg.sliding_window).expand(len(x), -1, -1)
    ratio = cfg.compress_ratios[layer]
    if ratio and len(positions) >= ratio:
        whole = len(positions) // ratio * ratio
        compressor = scope.at("compressor")
        raw = raw_rows(compressor, x[:, :whole], positions[:whole])
        entries = pool_entries(compressor, cfg, raw, 0, frequencies)
        if cfg.layer_type(layer) == CSA:
            indexer = scope.at("indexer")
            raw = raw_rows(indexer.at("compressor"), x[:, :whole], positions[:whole])
            index_keys = pool_index_keys(indexer.at("compressor"), cfg, raw, 0, frequencies)
            chosen = select_entries(indexer, cfg, x, latent, index_keys, positions, frequencies)
        else:
            chosen = entry_mask(positions, ratio, entries.shape[1]).expand(len(x), -1, -1)
        keys = torch.cat([keys, entries], dim=1)
        visible = torch.cat([visible, chosen], dim=-1)
    attended = attend(scope, cfg, queries, keys, visible)
    return project_output(scope, cfg, attended, positions, frequencies)
