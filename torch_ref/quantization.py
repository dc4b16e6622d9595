"""Number formats of the released checkpoints, and the rounding they cause at inference.

Storage: e4m3 matrices with one power-of-two scale (ue8m0) per 128x128 block, and e2m1 ("fp4")
expert matrices, two codes to a byte, with one such scale per 32 values of a row.
Simulation: the same formats applied to activations and cache rows, as float32 in, float32 out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHT_BLOCK = 128
EXPERT_BLOCK = 32
ACTIVATION_BLOCK = 128
CACHE_ROW_BLOCK = 64
INDEX_ROW_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Which roundings of the released inference program a forward pass imitates.

    ``linear_activations``: inputs of quantised linears to e4m3 per 128 values, outputs to
    bfloat16. ``cache_rows``: window rows and compressed entries to e4m3 per 64 values, their
    rotary part to bfloat16. ``index_rows``: indexer queries and keys through a Hadamard
    rotation, then e2m1 per 32 values. ``probabilities``: attention weights to bfloat16.
    """

    linear_activations: bool = False
    cache_rows: bool = False
    index_rows: bool = False
    probabilities: bool = False

    @classmethod
    def resolve(cls, choice: bool | Simulation) -> Simulation:
        """Turn ``True`` into every rounding and ``False`` into none."""
        if isinstance(choice, Simulation):
            return choice
        return cls(
            linear_activations=choice, cache_rows=choice, index_rows=choice, probabilities=choice
        )


def dequantize_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """Expand e4m3 ``weight [out, in]`` times ue8m0 ``scale [ceil(out/128), ceil(in/128)]``."""
    rows, columns = weight.shape
    expected = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale {tuple(scale.shape)} of an fp8 {(rows, columns)}, not {expected}")
    blocks = scale.float().repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return weight.float() * blocks[:rows, :columns]


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Expand packed e2m1 ``[out, in/2]`` (int8) times ue8m0 ``scale [out, in/32]``.

    The low nibble of a byte is the even column. Bit 3 of a code is the sign.
    """
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).long()
    rows, columns = codes.shape
    if tuple(scale.shape) != (rows, columns // EXPERT_BLOCK):
        raise ValueError(f"scale {tuple(scale.shape)} of an fp4 matrix {(rows, columns)}")
    magnitudes = torch.tensor(E2M1_VALUES)
    values = torch.cat([magnitudes, -magnitudes])[codes]
    return values * scale.float().repeat_interleave(EXPERT_BLOCK, 1)


def power_of_two_scale(amax: Tensor, floor: float, largest: float) -> Tensor:
    """Return ``2**ceil(log2(max(amax, floor) / largest))``, exactly."""
    mantissa, exponent = torch.frexp(amax.clamp(min=floor) / largest)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def round_e4m3(x: Tensor, block: int) -> Tensor:
    """Round float32 ``x`` to e4m3 with one power-of-two scale per ``block`` last-axis values."""
    return _round_blocks(
        x, block, 1e-4, E4M3_MAX, lambda y: y.to(torch.float8_e4m3fn).to(torch.float32)
    )


def round_e2m1(x: Tensor, block: int) -> Tensor:
    """Round float32 ``x`` to e2m1 with one power-of-two scale per ``block`` last-axis values."""
    return _round_blocks(x, block, E2M1_MAX * 2.0**-126, E2M1_MAX, _nearest_e2m1)


def round_bfloat16(x: Tensor) -> Tensor:
    """Round float32 ``x`` to bfloat16 precision."""
    return x.to(torch.bfloat16).to(torch.float32)


def round_cache_row(row: Tensor, rope_dim: int) -> Tensor:
    """Round key rows ``[..., D]`` as the cache stores them; the last ``rope_dim`` are bfloat16."""
    plain, rotary = row[..., :-rope_dim], row[..., -rope_dim:]
    return torch.cat([round_e4m3(plain, CACHE_ROW_BLOCK), round_bfloat16(rotary)], dim=-1)


def round_index_row(row: Tensor) -> Tensor:
    """Rotate indexer rows ``[..., I]`` by an orthonormal Hadamard matrix and round to e2m1."""
    return round_e2m1(row @ hadamard(row.shape[-1]), INDEX_ROW_BLOCK)


@lru_cache
def hadamard(size: int) -> Tensor:
    """Orthonormal Hadamard matrix ``[size, size]`` in Sylvester order; size a power of two."""
    if size & (size - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {size}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix * size**-0.5


def _round_blocks(x, block, floor, largest, rounding) -> Tensor:
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -width % block)).unflatten(-1, (-1, block))
    scale = power_of_two_scale(padded.abs().amax(-1, keepdim=True), floor, largest)
    return (rounding(padded / scale) * scale).flatten(-2)[..., :width]


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 value, halves to the even code."""
    values = torch.tensor(E2M1_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    up_at_half = torch.arange(7) % 2 == 1
    magnitude = x.abs().unsqueeze(-1)
    passed = (magnitude > middles) | ((magnitude == middles) & up_at_half)
    return torch.copysign(values[passed.sum(-1)], x)
