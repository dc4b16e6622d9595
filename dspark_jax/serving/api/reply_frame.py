"""What every response says around its choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from dspark_jax.serving.api.generation import Backend, ChoiceDelta, add_speculation
from dspark_jax.serving.api.schema import StreamOptions
from dspark_jax.serving.request import SpeculationStats


@dataclass
class ReplyFrame:
    """Identity and accounts of one response."""

    backend: Backend
    kind: str
    id_prefix: str
    num_prompt_tokens: int  # of every prompt once
    num_choices: int
    choices_per_prompt: int
    num_cached_tokens: int | None = None  # of `num_prompt_tokens`; None while nobody says
    num_completion_tokens: int = 0
    num_finished: int = 0
    speculation: dict[int, SpeculationStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.backend.model_name,
        }

    def account(self, delta: ChoiceDelta) -> None:
        """Count a delta's tokens; its speculation counts replace the choice's earlier ones.

        Of a prompt with several choices the first one says how many of its tokens were cached.
        """
        self.num_completion_tokens += delta.num_tokens
        if delta.num_cached_tokens is not None and delta.index % self.choices_per_prompt == 0:
            self.num_cached_tokens = (self.num_cached_tokens or 0) + delta.num_cached_tokens
        self.num_finished += delta.finish_reason is not None
        if delta.speculation is not None:
            self.speculation[delta.index] = delta.speculation

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response that is not streamed."""
        return {**self._head, "choices": choices, "usage": self.usage(), **self._metrics()}

    async def stream(
        self, chunks: AsyncGenerator[dict[str, Any], None], options: StreamOptions | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Wrap streamed choices; the usage comes last, or with each chunk, if it was asked for."""
        options = options or StreamOptions()
        has_usage = bool(options.include_usage)
        async for choice in chunks:
            event = {**self._head, "choices": [choice]}
            if has_usage:
                event["usage"] = self.usage() if options.continuous_usage_stats else None
            if choice["finish_reason"] is not None and self.num_finished == self.num_choices:
                event |= self._metrics()
            yield event
        if has_usage:
            yield {**self._head, "choices": [], "usage": self.usage()}

    def _metrics(self) -> dict[str, Any]:
        if not self.backend.reports_speculation:
            return {}
        stats = add_speculation(list(self.speculation.values()))
        return {"metrics": {"speculative_decoding": stats}}
