"""DeepGEMM beside `index_topk`, `expert_mlp` and `linear`: products of fp8 with fp8, which ours do not have.

Its inputs are quantised already, so that quantising, which a server pays for, is not in these times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.kernel_peers.call import PeerCall, PeerCase, relative_error, some
from benchmarks.kernel_peers.load import load_deep_gemm
from benchmarks.kernel_problems.experts import routing
from dspark_jax.kernels.expert_mlp.cases import FLASH as EXPERTS
from dspark_jax.kernels.index_topk.cases import FLASH as INDEX
from dspark_jax.kernels.linear.cases import FLASH as LINEARS

BLOCK = 128
SCORES, SCORES_TOPK = "DeepGEMM fp8 scores", "DeepGEMM fp8 scores + torch.topk"
LINEAR, MASKED = "DeepGEMM fp8 x fp8", "DeepGEMM masked fp8 x fp8, products only"
SCORE_SIZES = {
    "decode_64x2048 bfloat16": (64, 2048),
    "decode_64x32768 bfloat16": (64, 32768),
    "decode_512x2048 bfloat16": (512, 2048),
    "prefill_512x32768 bfloat16": (512, 32768),
    "prefill_2048x2048 bfloat16": (2048, 2048),
    "prefill_2048x8192 bfloat16": (2048, 8192),
    "prefill_2048x8192 float8_e4m3fn": (2048, 8192),
}
"""Tokens and entries by the names of our cases."""
PRODUCT_TOKENS = (64, 2048)
"""Few sizes: every shape is compiled for each of them, which takes seconds."""


def deep_gemm_cases(folder: Path, kernel: str) -> Iterator[PeerCase]:
    """The cases beside one of our kernels. The package is loaded here: PeerMissing where there is none."""
    dg = load_deep_gemm(folder)
    if kernel == "index_topk":
        for case, (tokens, entries) in SCORE_SIZES.items():
            for name, with_topk in ((SCORES, False), (SCORES_TOPK, True)):
                build = partial(scores_call, dg, tokens, entries, with_topk=with_topk)
                yield PeerCase(kernel, case, name, build)
    for tokens in PRODUCT_TOKENS:
        case = f"fp8 {tokens} tokens"
        if kernel == "linear":
            yield PeerCase(kernel, case, LINEAR, partial(linear_call, dg, tokens))
        if kernel == "expert_mlp":
            yield PeerCase(kernel, case, MASKED, partial(masked_call, dg, tokens))


class Fp8(NamedTuple):
    """e4m3 codes [..., M, K] and float32 scales, one per 128 columns and per row or per 128 rows."""

    codes: torch.Tensor
    scales: torch.Tensor

    def expanded(self) -> torch.Tensor:
        """The values in float32."""
        repeats = self.codes.shape[-2] // self.scales.shape[-2]
        scales = self.scales.repeat_interleave(repeats, -2).repeat_interleave(BLOCK, -1)
        return self.codes.float() * scales


def random_fp8(*shape: int, rows_per_scale: int, device: str) -> Fp8:
    """Random codes of this shape [..., M, K] with their scales [..., M / rows_per_scale, K / 128]."""
    codes = torch.randn(shape, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    scale_shape = (*shape[:-2], shape[-2] // rows_per_scale, shape[-1] // BLOCK)
    return Fp8(codes, torch.rand(scale_shape, device=device) + 0.5)


def rows_innermost(scales: torch.Tensor) -> torch.Tensor:
    """The same scales [..., M, K / 128] with M innermost in memory, as the kernels read those of activations.

    Columns must lie 16 bytes apart or a multiple of that; what comes otherwise they transpose in every call.
    """
    if scales.shape[-2] % 4:
        raise ValueError(f"the number of rows is a multiple of 4, not {scales.shape[-2]}")
    return scales.transpose(-1, -2).contiguous().transpose(-1, -2)


# --- indexer -----------------------------------------------------------------------------------


class ScoreArguments(NamedTuple):
    """q [T, H, D] and, per layer, keys [N, D] e4m3 with float32 scales [N]; weights [T, H] float32; each token
    scores the keys from `starts` to `ends`, both [T] int32, here all of them."""

    q: torch.Tensor
    keys: list[tuple[torch.Tensor, torch.Tensor]]
    weights: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


def score_arguments(tokens: int, entries: int, *, layers: int = 4, device: str) -> ScoreArguments:
    """Random arguments. One set of keys for all tokens, which is less to read than our decode cases have."""
    heads, width = INDEX["heads"], INDEX["width"]

    def codes(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.float8_e4m3fn)

    return ScoreArguments(
        q=codes(tokens, heads, width),
        keys=[
            (codes(entries, width), torch.rand(entries, device=device) + 0.5) for _ in range(layers)
        ],
        weights=torch.randn(tokens, heads, device=device),
        starts=torch.zeros(tokens, dtype=torch.int32, device=device),
        ends=torch.full((tokens,), entries, dtype=torch.int32, device=device),
    )


def score_reference(made: ScoreArguments, token: int) -> torch.Tensor:
    """One token's scores [N] of the first layer's keys, in float32."""
    keys, scales = made.keys[0]
    dots = torch.relu(made.q[token].float() @ (keys.float() * scales[:, None]).T)
    return made.weights[token] @ dots


def scores_call(
    dg: Any, tokens: int, entries: int, *, with_topk: bool, device: str = "cuda"
) -> PeerCall:
    """Scores, and after them the choice of `k` per token in any order."""
    made = score_arguments(tokens, entries, device=device)

    def scores(layer: int) -> torch.Tensor:
        return dg.fp8_fp4_mqa_logits(
            (made.q, None),
            made.keys[layer],
            made.weights,
            made.starts,
            made.ends,
            clean_logits=False,
        )

    def run(i: int) -> Any:
        out = scores(i % len(made.keys))
        return torch.topk(out, INDEX["k"], sorted=False) if with_topk else out

    def check() -> float:
        chosen = some(tokens).tolist()
        expected = torch.stack([score_reference(made, token) for token in chosen])
        return relative_error(scores(0)[chosen], expected)

    scored = tokens * entries
    flops = 2.0 * scored * INDEX["heads"] * INDEX["width"]
    return PeerCall(run=run, check=check, limit=1e-2, expected_ms=max(0.03, flops / 5e11))


# --- products ----------------------------------------------------------------------------------


def linear_call(dg: Any, tokens: int, *, layers: int = 2, device: str = "cuda") -> PeerCall:
    """All linears of a Flash layer one after the other, the grouped one as DeepSeek-V4's servers call it."""
    products = [
        _LinearProduct(dg, tokens, *size, layers=layers, device=device) for size in LINEARS.values()
    ]

    def run(i: int) -> None:
        for product in products:
            product.run(i % layers)

    num_weights = sum(outputs * inner * groups for outputs, inner, groups in LINEARS.values())
    return PeerCall(
        run=run,
        check=lambda: max(product.error() for product in products),
        limit=2e-2,
        expected_ms=max(0.06, 2.0 * tokens * num_weights / 6e11),
    )


class _LinearProduct:
    """x [T, G, K] through a matrix [G, N, K] to [T, G, N], G = 1 without its dimension."""

    def __init__(
        self,
        dg: Any,
        tokens: int,
        outputs: int,
        inner: int,
        groups: int,
        *,
        layers: int,
        device: str,
    ):
        self.dg, self.is_grouped = dg, groups > 1
        shape = (groups,) if self.is_grouped else ()
        self.x = random_fp8(*shape, tokens, inner, rows_per_scale=1, device=device)
        self.weights = [
            random_fp8(*shape, outputs, inner, rows_per_scale=BLOCK, device=device)
            for _ in range(layers)
        ]
        self.out = torch.empty(
            (tokens, *shape, outputs), dtype=torch.bfloat16, device=self.x.codes.device
        )
        self.x_scales = rows_innermost(self.x.scales)

    def run(self, layer: int) -> None:
        weight = tuple(self.weights[layer])
        if not self.is_grouped:
            self.dg.fp8_gemm_nt((self.x.codes, self.x_scales), weight, self.out)
            return
        x = self.x.codes.permute(1, 0, 2), self.x_scales.permute(1, 0, 2)
        self.dg.fp8_einsum("bhr,hdr->bhd", x, weight, self.out, recipe=(1, BLOCK, BLOCK))

    def error(self) -> float:
        self.run(0)
        chosen = some(len(self.out)).to(self.out.device)
        x, weight = self.x.expanded()[..., chosen, :], self.weights[0].expanded()
        expected = x @ weight.transpose(-1, -2)
        return relative_error(
            self.out[chosen], expected.transpose(0, 1) if self.is_grouped else expected
        )


def masked_call(dg: Any, tokens: int, *, device: str = "cuda") -> PeerCall:
    """The experts' gate-up and down products for our case's routing: no gathering, no activation, no sum."""
    ids = np.asarray(routing(tokens)["expert_ids"])
    counts = np.bincount(ids.reshape(-1), minlength=EXPERTS["experts"])
    model, width = EXPERTS["model"], EXPERTS["width"]
    products = [
        _MaskedProduct(dg, counts, outputs, inner, device=device)
        for outputs, inner in ((2 * width, model), (model, width))
    ]

    def run(i: int) -> None:
        del i  # one layer's weights are larger than the level-two cache by far
        for product in products:
            product.run()

    flops = 2.0 * ids.size * 3 * model * width
    return PeerCall(
        run=run,
        check=lambda: max(product.error() for product in products),
        limit=2e-2,
        expected_ms=max(1.2, flops / 5e11),
    )


class _MaskedProduct:
    """x [E, most, K] through [E, N, K] to [E, most, N], of which expert e has the first `counts[e]` rows."""

    def __init__(self, dg: Any, counts: np.ndarray, outputs: int, inner: int, *, device: str):
        experts = len(counts)
        self.dg, self.counts = dg, counts
        most = -(-int(counts.max()) // BLOCK) * BLOCK
        self.x = random_fp8(experts, most, inner, rows_per_scale=1, device=device)
        self.weight = random_fp8(experts, outputs, inner, rows_per_scale=BLOCK, device=device)
        self.out = torch.empty((experts, most, outputs), dtype=torch.bfloat16, device=device)
        self.x_scales = rows_innermost(self.x.scales)
        self.masked = torch.tensor(counts, dtype=torch.int32, device=device)
        self.expected_rows = -(-int(counts.sum()) // experts)

    def run(self) -> None:
        self.dg.m_grouped_fp8_gemm_nt_masked(
            (self.x.codes, self.x_scales),
            tuple(self.weight),
            self.out,
            self.masked,
            self.expected_rows,
        )

    def error(self) -> float:
        """Of the fullest expert."""
        self.run()
        expert = int(self.counts.argmax())
        rows = int(self.counts[expert])
        x, weight = (Fp8(m.codes[expert], m.scales[expert]) for m in (self.x, self.weight))
        expected = x.expanded()[:rows] @ weight.expanded().T
        return relative_error(self.out[expert, :rows], expected)
