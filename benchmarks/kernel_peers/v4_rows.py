"""DeepSeek-V4's fp8 cache rows as FlashMLA reads them: 584 bytes for a row of 512 values.

A page of S rows holds S x 576 bytes of data and after them S x 8 bytes of scales; pages start at multiples of 576
bytes. Data of a row: 448 e4m3 values, then 64 bfloat16 values (the rotated part). Scales: one byte per block of 64
e4m3 values, a power of two with the bias of 127, and one byte of padding.
"""

from __future__ import annotations

import torch

WIDTH, ROTARY, BLOCK = 512, 64, 64
PLAIN = WIDTH - ROTARY
DATA_BYTES = PLAIN + 2 * ROTARY
SCALE_BYTES = 8
ROW_BYTES = DATA_BYTES + SCALE_BYTES
_E4M3_MAX, _BIAS = 448.0, 127


def pack_pages(rows: torch.Tensor) -> torch.Tensor:
    """Rows [pages, S, 512] as bytes [pages, S, 1, 584], a view with the pages' padding between them.

    The last two dimensions are only how the kernel wants the shape: a row's 584 bytes do not stand together.
    """
    pages, per_page, width = rows.shape
    if width != WIDTH:
        raise ValueError(f"rows are {WIDTH} wide, not {width}")
    plain = rows[..., :PLAIN].float().unflatten(-1, (PLAIN // BLOCK, BLOCK))
    largest = plain.abs().amax(-1).clamp(min=1e-4)
    exponents = torch.ceil(torch.log2(largest / _E4M3_MAX))
    values = (plain * torch.exp2(-exponents)[..., None]).to(torch.float8_e4m3fn)
    rotary = rows[..., PLAIN:].to(torch.bfloat16).contiguous()
    data = torch.cat([values.flatten(-2).view(torch.uint8), rotary.view(torch.uint8)], -1)
    scales = torch.zeros(pages, per_page, SCALE_BYTES, dtype=torch.uint8, device=rows.device)
    scales[..., : exponents.shape[-1]] = (exponents + _BIAS).to(torch.uint8)
    used = per_page * ROW_BYTES
    stride = -(-used // DATA_BYTES) * DATA_BYTES
    packed = torch.zeros(pages, stride, dtype=torch.uint8, device=rows.device)
    packed[:, :used] = torch.cat([data.flatten(1), scales.flatten(1)], -1)
    return packed[:, :used].view(pages, per_page, 1, ROW_BYTES)


def read_rows(packed: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows [N, 512] in float32 at `places` [N] of pages as `pack_pages` gives them; place = page x S + row."""
    pages, per_page = packed.shape[:2]
    flat = packed.view(pages, per_page * ROW_BYTES)
    data = flat[:, : per_page * DATA_BYTES].unflatten(-1, (per_page, DATA_BYTES))
    scales = flat[:, per_page * DATA_BYTES :].unflatten(-1, (per_page, SCALE_BYTES))
    page, row = places // per_page, places % per_page
    data, scales = data[page, row], scales[page, row, : PLAIN // BLOCK]
    plain = data[:, :PLAIN].contiguous().view(torch.float8_e4m3fn).float()
    plain = plain.unflatten(-1, (-1, BLOCK)) * torch.exp2(scales.float() - _BIAS)[..., None]
    rotary = data[:, PLAIN:].contiguous().view(torch.bfloat16).float()
    return torch.cat([plain.flatten(-2), rotary], -1)
