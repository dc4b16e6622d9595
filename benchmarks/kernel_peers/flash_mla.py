"""FlashMLA beside `sparse_mla`: the same steps, with its fp8 V4 rows and with bfloat16 rows.

As in our problem, tokens of one request see windows that overlap, entries are drawn at random from a large pool,
and each call reads another layer. FlashMLA takes queries as they meet the rows, as ours does beside it; ours
rotates its output back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_peers.call import PeerCall, PeerCase, relative_error, some
from benchmarks.kernel_peers.load import load_flash_mla
from benchmarks.kernel_peers.v4_rows import WIDTH, pack_pages, read_rows

WINDOW = 128
PAGE = 64
DECODE, SPARSE = "FlashMLA fp8 decode", "FlashMLA bf16 sparse forward"
_SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Step:
    """Tokens of requests of `per_request` each, and what each token attends to beside its window."""

    tokens: int
    heads: int = 64
    listed: int = 512
    per_request: int = 8
    pool: int = 131072
    layers: int = 6

    @property
    def window_rows(self) -> int:
        """Rows of whole pages that hold a request's window and its new tokens."""
        return -(-(WINDOW + self.per_request) // PAGE) * PAGE

    @property
    def requests(self) -> int:
        return -(-self.tokens // self.per_request)

    @property
    def expected_ms(self) -> float:
        flops = 4.0 * self.tokens * (WINDOW + self.listed) * self.heads * WIDTH
        return max(0.02, flops / 3e11)


STEPS = {
    **{f"flash decode_{tokens}": Step(tokens) for tokens in (16, 64, 256, 1024, 2048)},
    "flash prefill_2048": Step(2048, per_request=2048),
    **{f"pro decode_{tokens}": Step(tokens, heads=128, listed=1024) for tokens in (16, 256)},
}
"""By the names of our cases."""


def flash_mla_cases(folder: Path) -> Iterator[PeerCase]:
    """Both kernels at every step; the binary is loaded here, and PeerMissing raised where there is none."""
    ops = load_flash_mla(folder)
    for case, step in STEPS.items():
        yield PeerCase("sparse_mla", case, DECODE, partial(decode_call, ops, step, "cuda"))
        yield PeerCase("sparse_mla", case, SPARSE, partial(sparse_call, ops, step, "cuda"))


def window_places(step: Step) -> torch.Tensor:
    """Places [T, 128] of each token's window, its own row last, in a pool of `requests * window_rows` rows."""
    token = torch.arange(step.tokens)
    first = token // step.per_request * step.window_rows + token % step.per_request + 1
    return first[:, None] + torch.arange(WINDOW)


@dataclass(frozen=True)
class DecodeArguments:
    """Of FlashMLA's decode over fp8 rows, with a token as a request of one query.

    q [T, 1, H, 512] bfloat16; windows and entries one tensor of packed pages per layer; places [T, 1, n] and
    counts [T] int32; sink [H] float32.
    """

    q: torch.Tensor
    windows: list[torch.Tensor]
    window_places: torch.Tensor
    window_counts: torch.Tensor
    entries: list[torch.Tensor]
    entry_places: torch.Tensor
    entry_counts: torch.Tensor
    sink: torch.Tensor


def decode_arguments(step: Step, device: str) -> DecodeArguments:
    """Random arguments of a step whose entry lists are full."""
    kwargs: dict[str, Any] = {"device": device}

    def pages(rows: int) -> list[torch.Tensor]:
        shape = (rows // PAGE, PAGE, WIDTH)
        return [pack_pages(torch.randn(shape, **kwargs)) for _ in range(step.layers)]

    def counts(count: int) -> torch.Tensor:
        return torch.full((step.tokens,), count, dtype=torch.int32, **kwargs)

    return DecodeArguments(
        q=torch.randn(step.tokens, 1, step.heads, WIDTH, dtype=torch.bfloat16, **kwargs),
        windows=pages(step.requests * step.window_rows),
        window_places=window_places(step)[:, None].to(device, torch.int32),
        window_counts=counts(WINDOW),
        entries=pages(step.pool),
        entry_places=_entry_places(step, device)[:, None],
        entry_counts=counts(step.listed),
        sink=torch.randn(step.heads, **kwargs),
    )


def decode_call(ops: Any, step: Step, device: str) -> PeerCall:
    """FlashMLA's decode. Its plan is made once, as a server makes it once per step and not per layer."""
    made = decode_arguments(step, device)

    def call(layer: int, plan: Any, splits: Any) -> Any:
        return ops.sparse_decode_fwd(
            made.q,
            made.windows[layer],
            made.window_places,
            made.window_counts,
            made.sink,
            plan,
            splits,
            made.entries[layer],
            made.entry_places,
            made.entry_counts,
            WIDTH,
            _SCALE,
            None,
        )

    _, _, plan, splits = call(0, None, None)

    def rows_of(token: int) -> torch.Tensor:
        pools = (made.windows[0], made.window_places), (made.entries[0], made.entry_places)
        return torch.cat([read_rows(packed, places[token, 0].long()) for packed, places in pools])

    def check() -> float:
        return _error(call(0, plan, splits)[0][:, 0], made.q[:, 0], made.sink, rows_of)

    return PeerCall(
        run=lambda i: call(i % step.layers, plan, splits),
        check=check,
        limit=3e-2,
        expected_ms=step.expected_ms,
    )


@dataclass(frozen=True)
class SparseArguments:
    """Of FlashMLA's sparse forward, where a pool holds the entries and after them the windows.

    q [T, H, 512] and one pool [N, 1, 512] per layer, both bfloat16; places [T, 1, 128 + listed] and counts [T]
    int32; sink [H] float32.
    """

    q: torch.Tensor
    pools: list[torch.Tensor]
    places: torch.Tensor
    counts: torch.Tensor
    sink: torch.Tensor


def sparse_arguments(step: Step, device: str) -> SparseArguments:
    """Random arguments of a step whose entry lists are full."""
    windows = window_places(step).to(device, torch.int32) + step.pool
    places = torch.cat([windows, _entry_places(step, device)], -1)
    rows = step.pool + step.requests * step.window_rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    return SparseArguments(
        q=normal(step.tokens, step.heads, WIDTH),
        pools=[normal(rows, 1, WIDTH) for _ in range(step.layers)],
        places=places[:, None].contiguous(),
        counts=torch.full((step.tokens,), places.shape[-1], dtype=torch.int32, device=device),
        sink=torch.randn(step.heads, device=device),
    )


def sparse_call(ops: Any, step: Step, device: str) -> PeerCall:
    """FlashMLA's sparse forward, meant for prompts: no splits, and rows that somebody has made bfloat16."""
    made = sparse_arguments(step, device)

    def call(layer: int) -> Any:
        return ops.sparse_prefill_fwd(
            made.q,
            made.pools[layer],
            made.places,
            _SCALE,
            WIDTH,
            made.sink,
            made.counts,
            None,
        )

    def check() -> float:
        rows_of = lambda token: made.pools[0][made.places[token, 0].long(), 0].float()
        return _error(call(0)[0], made.q, made.sink, rows_of)

    return PeerCall(
        run=lambda i: call(i % step.layers),
        check=check,
        limit=3e-2,
        expected_ms=step.expected_ms,
    )


def attention(
    q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """One token's attention [H, 512] in float32: q [H, 512] over rows [K, 512]; sink [H] a logit without row."""
    logits = torch.cat([q.float() @ rows.T * scale, sink.float()[:, None]], -1)
    return torch.softmax(logits, -1)[:, :-1] @ rows


def _entry_places(step: Step, device: str) -> torch.Tensor:
    """Random places [T, listed] in the pool."""
    shape = (step.tokens, step.listed)
    return torch.randint(step.pool, shape, dtype=torch.int32, device=device)


def _error(
    out: torch.Tensor, q: torch.Tensor, sink: torch.Tensor, rows_of: Callable[[int], torch.Tensor]
) -> float:
    """Error of some tokens of out [T, H, 512]; infinite where any is not finite."""
    if not torch.isfinite(out).all():
        return float("inf")
    tokens = some(len(out)).tolist()
    expected = [attention(q[token], rows_of(token), sink, _SCALE) for token in tokens]
    return relative_error(out[tokens], torch.stack(expected))
