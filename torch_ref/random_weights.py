"""Random, well-conditioned checkpoints for tests, and the tensor inventory they follow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_ref.config import CSA, TorchRefConfig


def tensor_shapes(cfg: TorchRefConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield published name and shape of every tensor of the trunk and of the drafter stages."""
    dim, vocab = cfg.hidden_size, cfg.vocab_size
    yield "embed.weight", (vocab, dim)
    for layer, ratio in enumerate(cfg.compress_ratios):
        prefix = f"layers.{layer}"
        yield from _block_shapes(cfg, prefix, hashed=layer < cfg.num_hash_layers)
        if ratio:
            is_csa = cfg.layer_type(layer) == CSA
            halves = 2 if is_csa else 1
            yield from _compressor_shapes(
                cfg, f"{prefix}.attn.compressor", ratio, halves, cfg.head_dim
            )
            if is_csa:
                indexer = f"{prefix}.attn.indexer"
                width = cfg.index_n_heads * cfg.index_head_dim
                yield f"{indexer}.wq_b.weight", (width, cfg.q_lora_rank)
                yield f"{indexer}.weights_proj.weight", (cfg.index_n_heads, dim)
                yield from _compressor_shapes(
                    cfg, f"{indexer}.compressor", ratio, 2, cfg.index_head_dim
                )
    yield "norm.weight", (dim,)
    yield from _hyper_head_shapes(cfg, "")
    yield "head.weight", (vocab, dim)
    if cfg.dspark_num_stages:
        for stage in range(cfg.dspark_num_stages):
            yield from _block_shapes(cfg, f"mtp.{stage}", hashed=False)
        yield "mtp.0.main_proj.weight", (dim, len(cfg.dspark_target_layer_ids) * dim)
        yield "mtp.0.main_norm.weight", (dim,)
        last = f"mtp.{cfg.dspark_num_stages - 1}."
        yield f"{last}norm.weight", (dim,)
        yield from _hyper_head_shapes(cfg, last)
        rank = cfg.dspark_markov_rank
        yield f"{last}markov_head.markov_w1.weight", (vocab, rank)
        yield f"{last}markov_head.markov_w2.weight", (vocab, rank)
        yield f"{last}confidence_head.proj.weight", (1, dim + rank)


def random_weights(cfg: TorchRefConfig, seed: int) -> dict[str, Tensor]:
    """Draw a checkpoint whose every parameter matters to the output.

    Matrices have unit gain; norms and scales are near one; sinks, gate biases, hyper-connection
    offsets and compressor position biases, which ordinary initialisation leaves at zero, are
    not. float32, except the int64 expert tables. Logits have a standard deviation near one.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(name, shape, cfg.n_routed_experts, generator)
        for name, shape in tensor_shapes(cfg)
    }


def _draw(name: str, shape: tuple[int, ...], num_experts: int, generator) -> Tensor:
    if name.endswith("tid2eid"):
        order = torch.rand(shape[0], num_experts, generator=generator).argsort(-1)
        return order[:, : shape[1]].contiguous()
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith("_scale"):
        return 1 + 0.1 * noise
    if name.endswith("gate.bias"):
        return 0.1 * noise
    if len(shape) == 1 or name.endswith(".ape"):
        return 0.5 * noise
    if name.endswith("markov_w1.weight"):
        return noise
    return noise * shape[-1] ** -0.5


def _block_shapes(cfg: TorchRefConfig, prefix: str, hashed: bool):
    dim, streams, experts = cfg.hidden_size, cfg.hc_mult, cfg.n_routed_experts
    heads_width = cfg.num_attention_heads * cfg.head_dim
    low_rank = cfg.o_groups * cfg.o_lora_rank
    for name in ("attn", "ffn"):
        yield f"{prefix}.{name}_norm.weight", (dim,)
        yield f"{prefix}.hc_{name}_fn", ((2 + streams) * streams, streams * dim)
        yield f"{prefix}.hc_{name}_base", ((2 + streams) * streams,)
        yield f"{prefix}.hc_{name}_scale", (3,)
    yield f"{prefix}.attn.wq_a.weight", (cfg.q_lora_rank, dim)
    yield f"{prefix}.attn.q_norm.weight", (cfg.q_lora_rank,)
    yield f"{prefix}.attn.wq_b.weight", (heads_width, cfg.q_lora_rank)
    yield f"{prefix}.attn.wkv.weight", (cfg.head_dim, dim)
    yield f"{prefix}.attn.kv_norm.weight", (cfg.head_dim,)
    yield f"{prefix}.attn.attn_sink", (cfg.num_attention_heads,)
    yield f"{prefix}.attn.wo_a.weight", (low_rank, heads_width // cfg.o_groups)
    yield f"{prefix}.attn.wo_b.weight", (dim, low_rank)
    yield f"{prefix}.ffn.gate.weight", (experts, dim)
    if hashed:
        yield f"{prefix}.ffn.gate.tid2eid", (cfg.vocab_size, cfg.num_experts_per_tok)
    else:
        yield f"{prefix}.ffn.gate.bias", (experts,)
    for expert in [f"experts.{index}" for index in range(experts)] + ["shared_experts"]:
        yield f"{prefix}.ffn.{expert}.w1.weight", (cfg.moe_intermediate_size, dim)
        yield f"{prefix}.ffn.{expert}.w2.weight", (dim, cfg.moe_intermediate_size)
        yield f"{prefix}.ffn.{expert}.w3.weight", (cfg.moe_intermediate_size, dim)


def _compressor_shapes(cfg: TorchRefConfig, prefix: str, ratio: int, halves: int, width: int):
    yield f"{prefix}.wkv.weight", (halves * width, cfg.hidden_size)
    yield f"{prefix}.wgate.weight", (halves * width, cfg.hidden_size)
    yield f"{prefix}.ape", (ratio, halves * width)
    yield f"{prefix}.norm.weight", (width,)


def _hyper_head_shapes(cfg: TorchRefConfig, prefix: str):
    yield f"{prefix}hc_head_fn", (cfg.hc_mult, cfg.hc_mult * cfg.hidden_size)
    yield f"{prefix}hc_head_base", (cfg.hc_mult,)
    yield f"{prefix}hc_head_scale", (1,)
