"""The target's loss: of a batch, with gradients, and of held-out text."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dspark_jax.config import ModelConfig
from dspark_jax.model.params import Params
from dspark_jax.training.data import held_out_windows, load_streams, unigram_nats
from dspark_jax.training.forward import (
    SequenceOutput,
    cast_params,
    forward,
    logits,
    trainable_specs,
)
from dspark_jax.training.tokenizer import TokenStream


def run(
    params: Params,
    table: jax.Array | None,
    cfg: ModelConfig,
    token_ids: jax.Array,
    *,
    dtype: Any,
    select: bool | jax.Array,
) -> tuple[SequenceOutput, jax.Array]:
    """Pass over token_ids [B, S] in `dtype`: the output and float32 logits [B, S, V]."""
    cast = cast_params(params, trainable_specs(cfg), dtype).replace(tid2eid=table)
    out = forward(cast, cfg, token_ids, select=select, fused=jax.default_backend() == "gpu")
    return out, logits(cast, out.hidden)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Loss in nats of logits [..., V] at labels [...]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def held_out_losses(
    params: Params,
    table: jax.Array | None,
    cfg: ModelConfig,
    streams: dict[str, TokenStream],
    *,
    length: int,
    dtype: Any,
    batch: int = 8,
) -> dict[str, dict[str, float]]:
    """Loss on every token of the held-out streams, by kind: nats and perplexity per token, bits per byte."""

    results = {}
    for kind, stream in streams.items():
        arrays = held_out_windows(stream, length, cfg.bos_token_id)
        fill = -len(arrays[0]) % batch
        arrays = [np.pad(a, ((0, fill), (0, 0))) for a in arrays]
        total = sum(
            float(_summed_loss(params, table, *(a[i : i + batch] for a in arrays), cfg, dtype))
            for i in range(0, len(arrays[0]), batch)
        )
        nats = total / (len(stream.tokens) - 1)
        results[kind] = {
            "nats": nats,
            "perplexity": math.exp(nats),
            "bits_per_byte": total / math.log(2) / stream.num_bytes,
        }
    return results


@functools.partial(jax.jit, static_argnums=(5, 6))
def _summed_loss(params, table, ids, labels, counted, cfg, dtype):
    _, predicted = run(params, table, cfg, ids, dtype=dtype, select=True)
    return jnp.sum(jnp.where(counted, cross_entropy(predicted, labels), 0.0))


def evaluate_target(
    params: Params,
    cfg: ModelConfig,
    tokens: Path,
    *,
    length: int,
    dtype: Any,
    against_unigram: bool,
) -> dict[str, dict[str, float]]:
    """`held_out_losses` on the streams in folder `tokens`, beside those of a unigram model if asked for."""
    held_out = load_streams(tokens, "held_out")
    losses = held_out_losses(
        params.replace(tid2eid=None), params.tid2eid, cfg, held_out, length=length, dtype=dtype
    )
    if against_unigram:
        seen = load_streams(tokens, "train")
        for kind, stream in held_out.items():
            nats = unigram_nats(seen, stream, cfg.vocab_size)
            losses[kind] |= {
                "unigram_perplexity": math.exp(nats),
                "unigram_bits_per_byte": nats * len(stream.tokens) / math.log(2) / stream.num_bytes,
            }
    return losses
