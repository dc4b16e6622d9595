"""An engine that says what it is told to, one scripted chunk after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.serving.api.generation import Backend
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.request import (
    FinishReason,
    Request,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
)
from tests.serving.tiny_tokenizer import raw_tokenizer, tiny_tokenizer

MODEL = "tiny"
EOS = 1
MODEL_CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=8,
    qk_rope_head_dim=4,
    q_lora_rank=8,
    o_groups=1,
    o_lora_rank=8,
    sliding_window=8,
    attention_kinds=(AttentionKind.SLIDING,),
    index_n_heads=2,
    index_head_dim=8,
    index_topk=4,
    max_position_embeddings=256,
    n_routed_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
)


def logprob_of(token_id: int) -> float:
    return -0.5 - token_id / 1024


def token_logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = {token_id + i: logprob_of(token_id) - i for i in range(num_top)}
    return TokenLogprob(token_id, logprob_of(token_id), top)


class FakeEngine:
    """Answers every request with `reply`, then the end of sequence, `chunk_len` tokens a step."""

    model_config = MODEL_CONFIG
    max_model_len = 256

    def __init__(self, reply: str = "hello world", *, chunk_len: int = 3) -> None:
        self.reply_ids = raw_tokenizer().encode(reply).ids
        self.chunk_len = chunk_len
        self.is_healthy = True
        self.is_draining = False
        self.requests: list[Request] = []
        self.num_running = 0
        self.num_aborted = 0
        self.num_steps = 0
        self.pause_s = 0.0
        self.error: str | None = None
        self.fails_at_chunk = 0
        self.refusal: Exception | None = None
        self.num_cached_tokens: list[int | None] = []  # of the next requests
        self.shutdowns: list[bool] = []

    async def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.num_running += 1
        is_done = False
        try:
            chunks = self._chunks(request)
            for position, chunk in enumerate(chunks):
                await asyncio.sleep(self.pause_s)
                self.num_steps += 1
                if self.error is not None and position >= self.fails_at_chunk:
                    yield TokenChunk((), finish_reason=FinishReason.ERROR, error=self.error)
                    is_done = True
                    return
                is_done = position == len(chunks) - 1
                yield chunk
        finally:
            self.num_running -= 1
            self.num_aborted += not is_done

    def _chunks(self, request: Request) -> list[TokenChunk]:
        sampling = request.sampling
        token_ids = list(self.reply_ids)
        if sampling.ignore_eos:
            token_ids = (token_ids * sampling.max_tokens)[: sampling.max_tokens]
        else:
            token_ids.append(EOS)
        finish, stop_id = FinishReason.LENGTH, None
        for position, token_id in enumerate(token_ids):
            if token_id in (*sampling.stop_token_ids, EOS) and position >= sampling.min_tokens:
                token_ids, finish, stop_id = token_ids[: position + 1], FinishReason.STOP, token_id
                break
        if len(token_ids) > sampling.max_tokens:
            token_ids, finish, stop_id = token_ids[: sampling.max_tokens], FinishReason.LENGTH, None
        num_cached = self.num_cached_tokens.pop(0) if self.num_cached_tokens else None
        groups = [
            token_ids[i : i + self.chunk_len] for i in range(0, len(token_ids), self.chunk_len)
        ]
        chunks = [self._chunk(request, group, first=i == 0) for i, group in enumerate(groups)]
        chunks[0] = chunks[0]._replace(num_cached_tokens=num_cached)
        last = chunks[-1]
        chunks[-1] = TokenChunk(
            last.token_ids,
            finish,
            stop_id,
            logprobs=last.logprobs,
            prompt_logprobs=last.prompt_logprobs,
            num_cached_tokens=last.num_cached_tokens,
            speculation=SpeculationStats(len(chunks), 7 * len(chunks), 4 * len(chunks), 6),
        )
        return chunks

    def _chunk(self, request: Request, token_ids: Sequence[int], *, first: bool) -> TokenChunk:
        sampling = request.sampling
        logprobs = prompt_logprobs = None
        if sampling.logprobs is not None:
            logprobs = tuple(token_logprob(i, sampling.logprobs) for i in token_ids)
        if sampling.prompt_logprobs is not None and first:
            rest = request.prompt_token_ids[1:]
            prompt_logprobs = (None, *(token_logprob(i, sampling.prompt_logprobs) for i in rest))
        return TokenChunk(tuple(token_ids), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def shutdown(self, drain: bool) -> None:
        self.is_draining = True
        self.shutdowns.append(drain)


def make_backend(engine: FakeEngine, **options) -> Backend:
    return Backend(
        engine=engine,
        tokenizer=tiny_tokenizer(),
        metrics=Metrics(MODEL),
        model_name=MODEL,
        **options,
    )
