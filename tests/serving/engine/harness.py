"""An engine over the fake executor, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from dspark_jax.config import AttentionKind, ModelConfig
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.policy import (
    FixedVerification,
    PlainDecoding,
    StepSize,
    VerificationPolicy,
)
from dspark_jax.serving.request import FinishReason, Request, SamplingParams, TokenChunk
from dspark_jax.serving.scheduler import Schedule
from tests.serving.engine.fake_executor import FakeExecutor
from tests.serving.engine.fake_model import EOS, VOCAB_SIZE, ordinary_output

TIMEOUT_S = 30.0

MODEL_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=4,
    qk_rope_head_dim=2,
    q_lora_rank=4,
    o_groups=1,
    sliding_window=4,
    o_lora_rank=4,
    attention_kinds=(AttentionKind.SLIDING,),
    index_n_heads=1,
    index_head_dim=4,
    index_topk=4,
    max_position_embeddings=64,
    n_routed_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=4,
    eos_token_id=EOS,
)


class ForcedBudget(FixedVerification):
    """Takes its budget from a function of the largest one; verification stays exact whatever it answers."""

    def __init__(
        self,
        draft_len: int,
        choose: Callable[[int], int],
        drafts: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(draft_len)
        self._choose, self._drafts = choose, drafts

    def size(self, schedule: Schedule) -> StepSize:
        return StepSize(self._choose(schedule.max_budget), drafts=self._drafts())


@dataclass
class Outcome:
    """Everything a request streamed."""

    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def last(self) -> TokenChunk:
        return self.chunks[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason


def make_request(
    request_id: str = "r", prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any
) -> Request:
    fields = dict(max_tokens=12, seed=0) | sampling
    return Request(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**fields)
    )


@contextlib.asynccontextmanager
async def serving(
    executor: FakeExecutor, policy: VerificationPolicy | None = None, **engine_args: Any
) -> AsyncIterator[Engine]:
    """A started engine, by default with fixed verification; shut down at the end."""
    if policy is None:
        draft_len = executor.draft_len
        policy = FixedVerification(draft_len) if draft_len else PlainDecoding()
    engine = Engine(
        executor,
        model_config=MODEL_CONFIG,
        metrics=engine_args.pop("metrics", None) or Metrics("fake"),
        build_policy=lambda warm: policy,
        **engine_args,
    )
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.wait_for(asyncio.to_thread(engine.shutdown, drain=False), TIMEOUT_S)


async def collect(engine: Engine, request: Request, *, stop_after: int | None = None) -> Outcome:
    """Run a request to its end, or close its stream once `stop_after` tokens have come."""
    outcome = Outcome()
    stream = engine.generate(request)
    async with contextlib.aclosing(stream), asyncio.timeout(TIMEOUT_S):
        async for chunk in stream:
            outcome.chunks.append(chunk)
            if stop_after is not None and len(outcome.tokens) >= stop_after:
                break
    return outcome


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


def check_ordinary(outcome: Outcome, request: Request, max_model_len: int) -> None:
    """The stream is token for token what ordinary decoding gives, and says why it ended."""
    tokens, reason = ordinary_output(request, max_model_len)
    assert outcome.tokens == tokens
    assert outcome.finish_reason is FinishReason(reason)
    assert all(chunk.finish_reason is None for chunk in outcome.chunks[:-1])
    assert all(chunk.token_ids for chunk in outcome.chunks)
    assert outcome.last.stop_token_id == (tokens[-1] if reason == "stop" else None)


def sample(registry: CollectorRegistry, name: str) -> float:
    """Value of an unlabelled metric of the engine."""
    value = registry.get_sample_value(name, {"model_name": "fake", "engine": "0"})
    assert value is not None, name
    return value
