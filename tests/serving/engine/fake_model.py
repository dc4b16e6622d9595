"""A deterministic language model: the next token is a hash of everything before it and the seed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from dspark_jax.decode.plan import Logprobs
from dspark_jax.serving.request import MAX_LOGPROBS, Request

VOCAB_SIZE = 50
EOS = 1


def next_token(
    context: Sequence[int], seed: int, *, stop_ids: Sequence[int] = (), min_len: int = 0
) -> int:
    """The token after `context`; no stop id while the context is shorter than `min_len`."""
    words = np.array([len(context), seed & 0xFFFFFFFF, seed >> 32, *context], np.uint32)
    token = zlib.crc32(words.tobytes()) % VOCAB_SIZE
    while len(context) < min_len and token in stop_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def ordinary_output(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """What decoding token by token gives, and why it ends."""
    sampling = request.sampling
    stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else (EOS,))
    context = list(request.prompt_token_ids)
    num_prompt = len(context)
    limit = min(num_prompt + sampling.max_tokens, max_model_len)
    min_len = num_prompt + sampling.min_tokens
    while True:
        token = next_token(context, sampling.seed or 0, stop_ids=stop_ids, min_len=min_len)
        context.append(token)
        if token in stop_ids:
            return context[num_prompt:], "stop"
        if len(context) >= limit:
            return context[num_prompt:], "length"


def score(context: Sequence[int], token: int) -> tuple[float, list[int], list[float]]:
    """Log-probability of `token` after `context`, and the most likely tokens with theirs."""
    base = zlib.crc32(np.array(context, np.uint32).tobytes())
    top_ids = [(base + i) % VOCAB_SIZE for i in range(MAX_LOGPROBS)]
    top = [-0.5 * i - 0.25 for i in range(MAX_LOGPROBS)]
    chosen = -float((base + 31 * token) % 1024) / 64
    return chosen, top_ids, top


def stack_scores(rows: Sequence[tuple[float, list[int], list[float]]]) -> Logprobs:
    chosen, top_ids, top = zip(*rows) if rows else ((), (), ())
    return Logprobs(
        np.array(chosen, np.float32),
        np.array(top_ids, np.int32).reshape(-1, MAX_LOGPROBS),
        np.array(top, np.float32).reshape(-1, MAX_LOGPROBS),
    )
