"""Pieces shared by trunk and drafters: norm, top-k, rotation, feed-forward, hyper-connections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_ref.config import TorchRefConfig
from torch_ref.scope import Scope


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, unweighted where ``weight`` is None."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def largest_first(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest last-axis scores, ties to the lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def inverse_frequencies(cfg: TorchRefConfig, compressed: bool) -> Tensor:
    """Angle per position of each rotary pair, float32 ``[R/2]``.

    Layers with a compressor use their own base, stretched by YaRN without any scaling of cosine
    and sine; layers with only the sliding window, the drafter's among them, use the plain table.
    """
    dim = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    pair = torch.arange(0, dim, 2, dtype=torch.float32)
    plain = 1.0 / theta ** (pair / dim)
    scaling = cfg.rope_scaling
    if not compressed or scaling is None:
        return plain

    def dim_of_rotations(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of_rotations(scaling.beta_fast)), 0)
    high: float = min(math.ceil(dim_of_rotations(scaling.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * len(frequencies)`` channels of ``x``, pairs of neighbours.

    ``x`` is ``[B, S, D]`` or ``[B, S, H, D]`` and ``positions`` int ``[S]``. ``inverse`` rotates
    by minus the position.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = angles.view(len(positions), *[1] * (x.dim() - 3), len(frequencies))
    cos, sin = angles.cos(), -angles.sin() if inverse else angles.sin()
    plain, rotary = x.split([x.shape[-1] - 2 * len(frequencies), 2 * len(frequencies)], dim=-1)
    even, odd = rotary[..., 0::2], rotary[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return torch.cat([plain, turned.flatten(-2)], dim=-1)


def swiglu(scope: Scope, x: Tensor, limit: float, row_weight: Tensor | None = None) -> Tensor:
    """Gated feed-forward ``w2(silu(min(w1 x, L)) * clamp(w3 x, -L, L))`` of one expert.

    ``row_weight [..., 1]``, the routing weight, multiplies before ``w2`` as in the released
    program, so that simulated rounding sees it.
    """
    gate = scope.quantized_linear("w1", x).clamp(max=limit)
    up = scope.quantized_linear("w3", x).clamp(min=-limit, max=limit)
    hidden = torch.nn.functional.silu(gate) * up
    if row_weight is not None:
        hidden = hidden * row_weight
    return scope.quantized_linear("w2", hidden)


def mixing_weights(
    scope: Scope, name: str, cfg: TorchRefConfig, streams: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection weights of one sub-block from ``streams [B, S, N, C]``.

    ``name`` is ``hc_attn`` or ``hc_ffn``. Returns ``pre [B, S, N]``, ``post [B, S, N]`` and
    ``comb [B, S, N, N]`` (source stream, destination stream), the last made nearly doubly
    stochastic by Sinkhorn's alternation, which ends on the columns.
    """
    n = cfg.hc_mult
    mixes = _stream_projection(scope[f"{name}_fn"], cfg, streams)
    base, (pre_scale, post_scale, comb_scale) = scope[f"{name}_base"], scope[f"{name}_scale"]
    pre = torch.sigmoid(mixes[..., :n] * pre_scale + base[:n]) + cfg.hc_eps
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * post_scale + base[n : 2 * n])
    comb = (mixes[..., 2 * n :] * comb_scale + base[2 * n :]).unflatten(-1, (n, n))
    comb = comb.softmax(-1) + cfg.hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + cfg.hc_eps)
    for _ in range(cfg.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + cfg.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + cfg.hc_eps)
    return pre, post, comb


def merge_streams(pre: Tensor, streams: Tensor) -> Tensor:
    """Input of a sub-block, ``sum_j pre_j X_j``: ``[B, S, N]``, ``[B, S, N, C]`` to ``[B, S, C]``."""
    return torch.einsum("bsn,bsnc->bsc", pre, streams)


def update_streams(post: Tensor, comb: Tensor, output: Tensor, streams: Tensor) -> Tensor:
    """Streams after a sub-block, ``X'_k = post_k y + sum_j comb_jk X_j``; this is the residual."""
    return post[..., None] * output[..., None, :] + torch.einsum("bsjk,bsjc->bskc", comb, streams)


def collapse_streams(scope: Scope, cfg: TorchRefConfig, streams: Tensor) -> Tensor:
    """Weigh the final streams ``[B, S, N, C]`` into the hidden state ``[B, S, C]`` of the head."""
    mixes = _stream_projection(scope["hc_head_fn"], cfg, streams)
    weights = torch.sigmoid(mixes * scope["hc_head_scale"] + scope["hc_head_base"]) + cfg.hc_eps
    return merge_streams(weights, streams)


def _stream_projection(fn: Tensor, cfg: TorchRefConfig, streams: Tensor) -> Tensor:
    flat = streams.flatten(-2)
    return rms_norm(flat, None, cfg.rms_norm_eps) @ fn.T
