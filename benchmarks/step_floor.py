"""What a step must at least take: bytes moved and operations done, counted from the configuration, over ceilings.

    python -m benchmarks.step_floor --layers 30

Counted once each: every weight that the step's tokens touch (of the experts those expected to be chosen), the
cache rows that the requests' attention reads, rows written, the streams between sub-blocks, and the logits. A part
takes at least the larger of bytes over bandwidth and operations over the arithmetic rate; parts follow one
another, so the floor of a step is their sum. Measured times come from the cost profile that a server's start left
in flash_sweep.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.flash_model import FLASH, overrides_for
from benchmarks.result import markdown_table
from dspark_jax.budget.cost_profile import profile_plan
from dspark_jax.config import AttentionKind, ModelConfig, load_config

_RESULTS = Path(__file__).parent / "results"
# Bytes per value: fp8 with a scale byte per 128 x 128, fp4 with one per 32.
_FP8, _BF16, _F32 = 1 + 1 / 128**2, 2.0, 4.0
_EXPERT_BYTES = {"fp4": 0.5 + 1 / 32, "fp8": _FP8, "bf16": _BF16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The least time of a step, by bucket."""

    model: Path = FLASH
    """Folder with a config.json."""
    layers: int | None = None
    """Layers of the model; all if left out."""
    draft_len: int = 7
    """Drafted tokens."""
    buckets: tuple[int, ...] = (
        1,
        4,
        8,
        16,
        32,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
    )
    """Tokens of a step; for each as many requests as the server's own profile uses."""
    max_num_seqs: int = 256
    """The server's flag."""
    context_len: int = 2032
    """Cached positions of every request."""
    gb_s: float | None = None
    """Copy bandwidth, bytes read and written; by default as measured in --ceilings."""
    tflop_s: float | None = None
    """Rate of a bfloat16 product; likewise."""
    ceilings: Path = _RESULTS / "kernels_h200.json"
    """Result of `benchmarks.kernels` on the GPU."""
    sweep: Path = _RESULTS / "flash_sweep.json"
    """Result of `benchmarks.flash_sweep` with measured step times; passed over if missing."""
    scenario: str | None = None
    """Whose step times; the last start's if left out."""


@dataclass(frozen=True)
class Work:
    """Bytes through device memory and operations of one part of a step."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def __mul__(self, count: float) -> Work:
        return Work(self.num_bytes * count, self.flops * count)

    def ms(self, gb_s: float, tflop_s: float) -> float:
        """The larger of the two times."""
        return max(self.num_bytes / gb_s / 1e6, self.flops / tflop_s / 1e9)


def verify_work(
    cfg: ModelConfig, *, tokens: int, requests: int, context_len: int, logit_rows: int
) -> dict[str, Work]:
    """The verifying half of a step, by part; the drafter's context rows included."""
    kinds = [cfg.attention_kinds.count(kind) for kind in AttentionKind]
    layers = cfg.num_hidden_layers
    parts = {
        "embedding": Work(tokens * cfg.hidden_size * _BF16),
        "linears": _linears(cfg, tokens) * layers + _compressor_linears(cfg, tokens),
        "experts": _experts(cfg, tokens) * layers,
        "attention": _attention(cfg, tokens, requests, context_len),
        "streams": _streams(cfg, tokens) * layers,
        "logits": _head(cfg, logit_rows),
    }
    assert sum(kinds) == layers
    if cfg.draft is not None:
        taps, stages = len(cfg.draft.target_layer_ids), cfg.draft.num_stages
        context = _product(tokens, taps * cfg.hidden_size, cfg.hidden_size, _FP8)
        context += _product(tokens, cfg.hidden_size, cfg.head_dim, _FP8) * stages
        parts["draft context"] = context
    return parts


def draft_work(cfg: ModelConfig, *, requests: int) -> dict[str, Work]:
    """The drafting half: stages over the whole block at once, then one transition per drafted token."""
    assert cfg.draft is not None
    drafts, stages = cfg.draft.block_size, cfg.draft.num_stages
    tokens = requests * drafts
    keys = cfg.sliding_window + drafts
    window = requests * cfg.sliding_window * cfg.head_dim * _BF16
    attention = Work(window, 4.0 * tokens * cfg.num_attention_heads * cfg.head_dim * keys)
    transition = _product(requests, cfg.draft.markov_rank, cfg.vocab_size, _BF16)
    return {
        "linears": _linears(cfg, tokens) * stages,
        "experts": _experts(cfg, tokens) * stages,
        "attention": attention * stages,
        "streams": _streams(cfg, tokens) * stages,
        "logits": _head(cfg, tokens),
        "transition": transition * drafts,
    }


def expected_experts(cfg: ModelConfig, tokens: int) -> float:
    """Experts of one layer that `tokens` tokens choose between them, if they choose at random."""
    share = cfg.num_experts_per_tok / cfg.n_routed_experts
    return cfg.n_routed_experts * (1 - (1 - share) ** tokens)


def _product(rows: float, inputs: int, outputs: int, weight_bytes: float) -> Work:
    """Rows [rows, inputs] times a matrix [outputs, inputs]: the matrix once, rows in and out in bfloat16."""
    moved = inputs * outputs * weight_bytes + rows * (inputs + outputs) * _BF16
    return Work(moved, 2.0 * rows * inputs * outputs)


def _linears(cfg: ModelConfig, tokens: int) -> Work:
    """The matrices of one layer besides routed experts and compressors."""
    c, d, h = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads
    group = h * d // cfg.o_groups
    work = _product(tokens, c, cfg.q_lora_rank, _FP8)
    work += _product(tokens, cfg.q_lora_rank, h * d, _FP8)
    work += _product(tokens, c, d, _FP8)
    work += _product(tokens, group, cfg.o_lora_rank, _FP8) * cfg.o_groups
    work += _product(tokens, cfg.o_groups * cfg.o_lora_rank, c, _FP8)
    work += _product(tokens, c, 2 * cfg.moe_intermediate_size, _FP8)
    work += _product(tokens, cfg.moe_intermediate_size, c, _FP8)
    return work + _product(tokens, c, cfg.n_routed_experts, _BF16)


def _compressor_linears(cfg: ModelConfig, tokens: int) -> Work:
    """Values and gates of the compressors, and the indexer's matrices, of all layers that have them."""
    c, d, i = cfg.hidden_size, cfg.head_dim, cfg.index_head_dim
    csa = _product(tokens, c, 4 * d, _BF16) + _product(tokens, c, 4 * i, _BF16)
    csa += _product(tokens, cfg.q_lora_rank, cfg.index_n_heads * i, _FP8)
    csa += _product(tokens, c, cfg.index_n_heads, _BF16)
    hca = _product(tokens, c, 2 * d, _BF16)
    count = cfg.attention_kinds.count
    return csa * count(AttentionKind.CSA) + hca * count(AttentionKind.HCA)


def _experts(cfg: ModelConfig, tokens: int) -> Work:
    """The routed experts of one layer."""
    values = 3 * cfg.hidden_size * cfg.moe_intermediate_size
    rows = tokens * cfg.num_experts_per_tok
    weights = expected_experts(cfg, tokens) * values * _EXPERT_BYTES[cfg.expert_dtype]
    # Tokens in and out once; what lies between gate, up and down stays on the chip at best.
    return Work(weights + 2 * tokens * cfg.hidden_size * _BF16, 2.0 * rows * values)


def _attention(cfg: ModelConfig, tokens: int, requests: int, context_len: int) -> Work:
    """Attention, indexer and cache writes of all layers; a request's rows are read once for all its tokens."""
    d, i, h = cfg.head_dim, cfg.index_head_dim, cfg.num_attention_heads
    window = min(context_len, cfg.sliding_window)
    in_csa, in_hca = context_len // cfg.csa_ratio, context_len // cfg.hca_ratio
    total = Work()
    for kind in cfg.attention_kinds:
        entries, read, written, flops = 0, 0.0, d * _BF16, 0.0
        if kind is AttentionKind.CSA:
            entries = min(in_csa, cfg.index_topk)
            read = in_csa * i * _BF16
            flops = 2.0 * cfg.index_n_heads * i * in_csa
            written += (4 * d + 4 * i) * _F32
        elif kind is AttentionKind.HCA:
            entries = in_hca
            written += 2 * d * _F32
        read += (window + entries) * d * _BF16
        flops += 4.0 * h * d * (window + entries)
        # Queries in, outputs out.
        moved = requests * read + tokens * (written + 2 * h * d * _BF16)
        total += Work(moved, tokens * flops)
    return total


def _streams(cfg: ModelConfig, tokens: int) -> Work:
    """The residual streams of one layer: read and written around each of its two sub-blocks."""
    width = cfg.hc_mult * cfg.hidden_size
    mixes = (2 + cfg.hc_mult) * cfg.hc_mult
    weights = mixes * width * _F32
    return Work(weights + 2 * tokens * width * _BF16, 2.0 * tokens * width * mixes) * 2


def _head(cfg: ModelConfig, rows: int) -> Work:
    """Logits in float32, written by the product and read by the sampler."""
    product = _product(rows, cfg.hidden_size, cfg.vocab_size, _BF16)
    return product + Work(rows * cfg.vocab_size * (2 * _F32 - _BF16))


def floor_rows(
    cfg: ModelConfig,
    options: Options,
    *,
    gb_s: float,
    tflop_s: float,
    measured: Mapping[int, float],
) -> list[dict[str, Any]]:
    """The table of the verifying half, a row per bucket."""
    assert cfg.draft is not None
    shapes = profile_plan(
        options.buckets,
        max_tokens=options.buckets[-1],
        max_requests=options.max_num_seqs,
        draft_len=cfg.draft.block_size,
    )
    rows = []
    for shape in shapes:
        parts = verify_work(
            cfg,
            tokens=shape.num_tokens,
            requests=shape.num_requests,
            context_len=options.context_len,
            logit_rows=shape.num_tokens,
        )
        rows.append(
            {
                "tokens": shape.num_tokens,
                "requests": shape.num_requests,
                **_columns(parts, gb_s, tflop_s, measured.get(shape.num_tokens)),
            }
        )
    return rows


def draft_rows(
    cfg: ModelConfig,
    options: Options,
    *,
    gb_s: float,
    tflop_s: float,
    measured: Mapping[int, float],
) -> list[dict[str, Any]]:
    """The table of the drafting half, a row per request count."""
    counts = sorted({b for b in options.buckets if b <= options.max_num_seqs} | set(measured))
    return [
        {
            "requests": count,
            **_columns(draft_work(cfg, requests=count), gb_s, tflop_s, measured.get(count)),
        }
        for count in counts
    ]


def _columns(
    parts: Mapping[str, Work], gb_s: float, tflop_s: float, measured_ms: float | None
) -> dict[str, Any]:
    total = sum(parts.values(), Work())
    floor_ms = sum(work.ms(gb_s, tflop_s) for work in parts.values())
    return {
        "GB": total.num_bytes / 1e9,
        "experts, GB": parts["experts"].num_bytes / 1e9,
        "TFLOP": total.flops / 1e12,
        "all bytes, ms": total.num_bytes / gb_s / 1e6,
        "all operations, ms": total.flops / tflop_s / 1e9,
        "floor, ms": floor_ms,
        "measured, ms": measured_ms,
        "measured / floor": None if measured_ms is None else measured_ms / floor_ms,
    }


def measured_curves(
    starts: Sequence[Mapping[str, Any]], scenario: str | None, context_len: int
) -> tuple[dict[int, float], dict[int, float], int | None]:
    """Verify and draft times of the last start, at the context nearest to `context_len`, and that context.

    `starts` are those of flash_sweep.json, `scenario` whose to look at, or any.
    """
    measured = [
        start for start in starts if start["curves"] and scenario in (None, start["scenario"])
    ]
    if not measured:
        return {}, {}, None
    curve = min(measured[-1]["curves"], key=lambda c: abs(c["context_len"] - context_len))
    return dict(curve["verify"]), dict(curve["draft"]), curve["context_len"]


def tables(options: Options, starts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Both tables and a line on the ceilings, as Markdown."""
    overrides = overrides_for(options.model, layers=options.layers, draft_len=options.draft_len)
    cfg = load_config(options.model, overrides)
    gb_s, tflop_s = options.gb_s, options.tflop_s
    if gb_s is None or tflop_s is None:
        ceilings = json.loads(options.ceilings.read_text())
        gb_s = gb_s or ceilings["bytes_per_s"] / 1e9
        tflop_s = tflop_s or ceilings["flops"] / 1e12
    verify, draft, context = measured_curves(starts, options.scenario, options.context_len)
    rates = {"gb_s": gb_s, "tflop_s": tflop_s}
    return (
        f"{markdown_table(floor_rows(cfg, options, measured=verify, **rates))}\n"
        f"{markdown_table(draft_rows(cfg, options, measured=draft, **rates))}\n"
        f"{cfg.num_hidden_layers} layers, {options.context_len} cached positions"
        f"{'' if context is None else f' (measured at {context})'}; "
        f"ceilings {gb_s:.0f} GB/s and {tflop_s:.0f} TFLOP/s.\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the tables; the exit status."""
    options = tyro.cli(Options, args=argv)
    starts = json.loads(options.sweep.read_text())["starts"] if options.sweep.exists() else []
    print(tables(options, starts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
