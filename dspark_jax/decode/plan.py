"""The host's side of one step: what it asks for and what it gets back, as plain NumPy.

The executor packs a `StepPlan` into two arrays (integers, floats) plus prompt ids and the page table; the device
answers with `StepOutputs`. Rows are requests; a row is keyed by its slot for the request's whole life.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.row_layout import PackedRow, pack_row


class RowFinish(enum.IntEnum):
    """Why the device ended a row in this step."""

    RUNNING = 0
    STOP = 1  # a stop id was committed; it is the last token of the row
    LENGTH = 2  # the row reached its limit
    NON_FINITE = 3  # the row's logits were not finite; nothing was committed


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One request in one step.

    A *prompt row* has `prompt_ids` (the next tokens to feed, from absolute position `start`) and samples only if
    `samples`, i.e. if the chunk ends the known tokens. A *decode row* has no `prompt_ids`: the device feeds the
    slot's anchor and up to `draft_cap` of its pending draft, at a position that only the device knows.
    `limit` is the total length (prompt and output) at which the row ends; before `min_len` total tokens the stop
    ids cannot be drawn. Prompt tokens from position `prompt_len` on were output before a pre-emption: penalties
    count them as output. `stop_ids` holds the end-of-sequence id too unless it is to be ignored.
    """

    slot: int
    prompt_ids: np.ndarray | None = None  # int32 [n]
    start: int = 0
    samples: bool = True
    draft_cap: int = 0
    limit: int
    prompt_len: int
    min_len: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0  # 0 .. 2**64 - 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that are not drafts."""
        return 1 if self.prompt_ids is None else len(self.prompt_ids)

    @cached_property
    def packed(self) -> PackedRow:
        """The row's bytes, made once: a decoding request has the same row in every step."""
        return pack_row(self)

    @cached_property
    def effort(self) -> Effort:
        """What the row needs between logits and tokens; if it holds stop ids back at first, then to its end.

        The host learns late how long a text is, so it cannot tell when the last stop id was held back.
        """
        penalized = (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        described = self.wants_logprobs or self.wants_prompt_logprobs
        holds_stops = self.min_len > self.prompt_len
        needs = penalized or described or holds_stops or (filtered and self.temperature > 0)
        return Effort.FULL if needs else Effort.PLAIN


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step. `budget` drafts are verified in all; `bucket` tokens hold sum(num_tokens) + budget.

    The first `min_depth` drafts of every row are bought before any other.
    """

    rows: tuple[RowPlan, ...]
    page_table: np.ndarray  # int32 [slots, max_pages], -1 where no page is held
    budget: int
    bucket: int
    drafts: bool  # run the drafter after the verification
    min_depth: int = 0

    @property
    def effort(self) -> Effort:
        """What suffices for all rows."""
        return max((row.effort for row in self.rows), default=Effort.PLAIN)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of logit rows [N]: the token that followed, and the most likely ones."""

    chosen: np.ndarray  # float32 [N]
    top_ids: np.ndarray  # int32 [N, MAX]
    top: np.ndarray  # float32 [N, MAX]


@dataclass(frozen=True)
class StepOutputs:
    """Everything that comes back from a step, in the order of the plan's rows. G is the draft length."""

    tokens: (
        np.ndarray
    )  # int32 [R, G + 1] committed tokens, the first num_tokens of each row are valid
    num_tokens: np.ndarray  # int32 [R], 0 for a row that did not sample or had already ended
    finish: np.ndarray  # int32 [R], RowFinish
    verify_lens: np.ndarray  # int32 [R] drafts admitted
    confidences: np.ndarray  # float32 [R, G] conditional, of the proposal this step made
    logprobs: Logprobs | None  # rows r * (G + 1) + j describe tokens[r, j]
    prompt_logprobs: (
        Logprobs | None
    )  # one row per fed prompt token of rows that want them, in order; it describes the token fed after it,
    # so the last row of a chunk is unused: the next chunk feeds that token again
