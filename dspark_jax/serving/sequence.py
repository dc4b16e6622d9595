"""One request on its way through the engine: its known tokens, its place on the device, its state."""

from __future__ import annotations

import enum
from collections.abc import Sequence as ReadOnlySequence
from typing import Any

import numpy as np

from dspark_jax.budget import NO_PROPOSAL
from dspark_jax.decode.plan import RowPlan
from dspark_jax.serving.request import FinishReason, Request, SpeculationStats, TokenLogprob

NO_SLOT = -1


class Status(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a pre-empted sequence goes back to WAITING, an abort ends either."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Host state of a request.

    Known tokens are the prompt and the output that has landed. While steps are in flight the real length lies
    between `min_len` and `max_len`: the device knows it, the host doesn't. A sequence that ends in one of them
    is shorter than `min_len`, and `max_len` may exceed `limit`.
    """

    def __init__(
        self,
        request: Request,
        *,
        max_model_len: int,
        eos_token_id: int,
        seed: int,
    ) -> None:
        """`seed` is 0 .. 2**64 - 1.

        Raises ValueError for a prompt that leaves no room for a token, or if none is wanted.
        """
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        if not 0 < num_prompt < max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; it must have 1 to {max_model_len - 1}"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        self.request = request
        self.prompt = np.asarray(request.prompt_token_ids, np.int32)
        self.output: list[int] = []
        self.limit = min(len(self.prompt) + sampling.max_tokens, max_model_len)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stats = SpeculationStats()
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in self.prompt]

        self.slot = NO_SLOT
        self.pages: list[int] = []
        self.feed = self.prompt  # what this tenancy of the slot starts from
        self.num_fed = 0
        self.proposal_serial = NO_PROPOSAL  # step that drafted what the next step can verify

        self.digests: list[bytes] = []  # of full pages of known tokens, see `prefix_cache`
        self.num_remembered = 0  # tokens of `feed` whose pages the prefix cache knows
        self.cuts: frozenset[int] = frozenset()  # lengths of which its rings are to be saved
        self.num_cached_tokens: int | None = None  # of the prompt, when it was first admitted

        self.num_in_flight = 0
        self.min_len = len(self.prompt)
        self.max_len = len(self.prompt)

        stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos and eos_token_id not in stop_ids:
            stop_ids = (*stop_ids, eos_token_id)
        self._row_fields: dict[str, Any] = dict(
            limit=self.limit,
            prompt_len=len(self.prompt),
            min_len=len(self.prompt) + sampling.min_tokens,
            stop_ids=stop_ids,
            seed=seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            wants_logprobs=sampling.logprobs is not None,
        )
        self._decode_rows: dict[int, RowPlan] = {}

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def next_start(self) -> int:
        """Position from which the next prompt row feeds.

        A prompt that is scored is fed again from the last token of the chunk before: a row's last token has no
        score, because the token after it is in another row.
        """
        return self.num_fed - 1 if self.wants_prompt_logprobs and self.num_fed else self.num_fed

    @property
    def num_until_cut(self) -> int:
        """Tokens of `feed` from `next_start` on that one row may feed."""
        ends = [cut for cut in self.cuts if cut > self.num_fed]
        return min(ends, default=len(self.feed)) - self.next_start

    @property
    def is_decoding(self) -> bool:
        return self.num_fed == len(self.feed)

    @property
    def is_surely_ending(self) -> bool:
        """True when the steps in flight reach the limit whatever they commit, so another one is of no use."""
        return self.min_len >= self.limit

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the prompt has been scored: they went out with the first output."""
        return self.prompt_logprobs is not None and not self.output

    def known_ids(self) -> np.ndarray:
        """The known tokens, int32 [num_known]."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    def skipped_counts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens before the first one to feed: occurrences in the output, int32 [V], and presence in the
        prompt, bool [V].
        """
        skipped, num_prompt = self.feed[: self.num_fed], len(self.prompt)
        output = np.bincount(skipped[num_prompt:], minlength=vocab_size)
        prompt = np.bincount(skipped[:num_prompt], minlength=vocab_size)
        return output.astype(np.int32), prompt > 0

    def admit(self, slot: int, *, num_cached: int = 0, cuts: frozenset[int] = frozenset()) -> None:
        """Move into a slot. A sequence that was pre-empted starts again from its prompt and its output.

        The first `num_cached` tokens need not be fed; no row feeds tokens on both sides of a length in `cuts`.
        """
        self.status = Status.RUNNING
        self.slot = slot
        self.feed = self.known_ids()
        self.num_fed = self.num_remembered = num_cached
        self.cuts = cuts
        self.proposal_serial = NO_PROPOSAL
        self._decode_rows.clear()

    def leave(self, status: Status) -> None:
        """Move out of the slot. Steps in flight still belong to the sequence and are committed when they land."""
        self.status = status
        self.slot = NO_SLOT
        self.pages = []

    def prompt_row(self, num_tokens: int) -> RowPlan:
        """Row that feeds the next `num_tokens` of `feed`; it samples if they are the last."""
        start = self.next_start
        end = start + num_tokens
        return RowPlan(
            slot=self.slot,
            prompt_ids=self.feed[start:end],
            start=start,
            samples=end == len(self.feed),
            wants_prompt_logprobs=self.wants_prompt_logprobs,
            **self._row_fields,
        )

    def decode_row(self, draft_cap: int) -> RowPlan:
        """Row that feeds the anchor and up to `draft_cap` drafts. Nothing else in it changes, so it is kept."""
        row = self._decode_rows.get(draft_cap)
        if row is None:
            row = RowPlan(slot=self.slot, draft_cap=draft_cap, **self._row_fields)
            self._decode_rows[draft_cap] = row
        return row

    def on_dispatch(self, min_growth: int, max_growth: int) -> None:
        """A step that commits between `min_growth` and `max_growth` tokens is in flight."""
        self.num_in_flight += 1
        self.min_len += min_growth
        self.max_len += max_growth

    def on_landing(
        self, min_growth: int, max_growth: int, token_ids: ReadOnlySequence[int]
    ) -> None:
        """That step has landed and committed `token_ids`."""
        self.num_in_flight -= 1
        self.min_len += len(token_ids) - min_growth
        self.max_len += len(token_ids) - max_growth
        self.output.extend(token_ids)
