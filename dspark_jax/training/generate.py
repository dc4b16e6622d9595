"""Sampling from the trained target, many sequences at a time: the drafter's training text.

One token per step for thousands of sequences. The probability of every sampled token is recorded, so that it can
be checked against `training.forward`. What the drafter is trained on, the target's features, falls out of the same
pass and stays on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.model.params import Params
from dspark_jax.training.forward import logits
from dspark_jax.training.token_step import empty_caches, step


class Features(NamedTuple):
    """What the target computed for every token but the last, position first."""

    taps: jax.Array  # [S-1, B, taps, M] stream means after the drafter's target layers
    hidden: jax.Array  # [S-1, B, M] input of the output head: the distribution of the next token


class Sampled(NamedTuple):
    """Sequences and the log-probability of each token given those before it (zero in the first column)."""

    tokens: jax.Array  # [B, S] int32
    logprobs: jax.Array  # [B, S] float32, of the target at temperature 1
    features: Features


class Text(NamedTuple):
    """What the target wrote behind prompts, and what it computed meanwhile.

    Of long prompts only the end is kept: the drafter sees no further back than its window, and differences of
    positions alone, so the columns count from zero.
    """

    tokens: jax.Array  # [B, S] int32
    prompt_lens: jax.Array  # [B] int32
    features: Features


@functools.partial(jax.jit, static_argnames=("cfg", "length", "fused"))
def sample(
    params: Params,
    cfg: ModelConfig,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    key: jax.Array,
    *,
    offset: int | jax.Array = 0,
    length: int | None = None,
    temperature: float | jax.Array = 1.0,
    fused: bool = False,
) -> Sampled:
    """Continue prompts, and return `length` columns from position `offset` on.

    Args:
      params: plain arrays; computes in the dtype of `params.embed`.
      prompts: int [B, P]; of row b the first prompt_lens[b] > offset ids are given and the rest is ignored.
      key: a typed key; "rbg" keys are much faster on a GPU.
      offset: what lies before it is read, but not returned.
      length: columns of the result, offset + length <= P; P by default.
      temperature: 0 takes the most probable token.
    """
    batch, capacity = prompts.shape
    length = capacity if length is None else length
    caches = empty_caches(cfg, batch, capacity, params.embed.dtype)
    divisor = jnp.where(temperature == 0, 1.0, temperature)

    def token_at(position: int | jax.Array) -> jax.Array:
        column = jax.lax.dynamic_index_in_dim(prompts, position, axis=1, keepdims=False)
        return column.astype(jnp.int32)

    def read(position, caches):
        return step(params, cfg, caches, token_at(position), position, fused=fused)[2]

    def advance(carry, position):
        caches, token = carry
        hidden, taps, caches = step(params, cfg, caches, token, position, fused=fused)
        predicted = logits(params, hidden)
        noise = jax.random.gumbel(jax.random.fold_in(key, position), predicted.shape)
        noise = jnp.where(temperature == 0, 0.0, noise)
        drawn = jnp.argmax(predicted / divisor + noise, axis=-1)
        token = jnp.where(position + 1 < prompt_lens, token_at(position + 1), drawn)
        token = token.astype(jnp.int32)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(predicted), token[:, None], axis=1)[:, 0]
        return (caches, token), (token, logprob, Features(taps, hidden))

    caches = jax.lax.fori_loop(0, offset, read, caches)
    first = token_at(offset)
    _, (tokens, logprobs, features) = jax.lax.scan(
        advance, (caches, first), offset + jnp.arange(length - 1)
    )
    return Sampled(
        tokens=jnp.concatenate([first[:, None], tokens.T], axis=1),
        logprobs=jnp.concatenate([jnp.zeros((batch, 1)), logprobs.T], axis=1),
        features=features,
    )


def write_text(
    params: Params,
    cfg: ModelConfig,
    prompts: np.ndarray,
    prompt_lens: np.ndarray,
    seed: int,
    *,
    offset: int = 0,
    length: int | None = None,
    temperature: float = 1.0,
) -> Text:
    """`sample` with the generator and the kernels of the machine that it runs on."""
    on_gpu = jax.default_backend() == "gpu"
    sampled = sample(
        params,
        cfg,
        jnp.asarray(prompts),
        jnp.asarray(prompt_lens),
        jax.random.key(seed, impl="rbg"),
        offset=jnp.int32(offset),
        length=prompts.shape[1] if length is None else length,
        temperature=jnp.float32(temperature),
        fused=on_gpu,
    )
    return Text(sampled.tokens, jnp.asarray(prompt_lens) - offset, sampled.features)
