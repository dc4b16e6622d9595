"""A loop over the two halves of a step, without the serving engine: any budgets, chunks, company and delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.decode.draft_step import DraftOptions, draft_step
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import pack
from dspark_jax.decode.plan import RowFinish, RowPlan, StepPlan
from dspark_jax.decode.settle import DeviceLogprobs, DeviceOutputs
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.decode.step import ModelParams, verify_step
from dspark_jax.decode.verify import Method
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry, page_tokens
from tests.quick_jit import quick_jit

SLOTS = 4
TOKENS = 32
MAX_LEN = 96


class Programs(NamedTuple):
    """The compiled halves of a step; `draft` is None for ordinary decoding."""

    verify: Callable[..., tuple[DecodeState, DeviceOutputs]]
    draft: Callable[..., tuple[DecodeState, jax.Array]] | None


@cache
def programs(
    cfg: ModelConfig,
    method: Method = Method.STANDARD,
    *,
    greedy_drafts: bool = False,
    drafter: bool = True,
) -> Programs:
    """Both halves for the shapes of this module, compiled once per process."""
    options = StepOptions(
        tokens=TOKENS,
        logit_rows=TOKENS,
        method=method,
        dispatch=Dispatch(),
    )
    verify = quick_jit(partial(verify_step, cfg=cfg, options=options))
    if not drafter:
        return Programs(verify, None)
    drafting = DraftOptions(method=method, greedy_drafts=greedy_drafts, dispatch=Dispatch())
    return Programs(verify, quick_jit(partial(draft_step, cfg=cfg, options=drafting)))


class Logprob(NamedTuple):
    """Log-probability of one token, and the best alternatives."""

    chosen: float
    top_ids: np.ndarray
    top: np.ndarray


@dataclass
class Request:
    """A text to continue. `sampling` are fields of `RowPlan`; `limit` is the total length."""

    prompt: Sequence[int]
    limit: int
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_len: int | None = None  # where tokens of the prompt were output before
    tokens: list[int] = field(default_factory=list)
    finish: RowFinish = RowFinish.RUNNING
    verify_lens: list[int] = field(default_factory=list)  # per step that sampled
    accept_lens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    fed: int = 0
    late_steps: int = 0  # steps planned after the end
    slot: int = -1


Budget = Callable[["Loop", int], int]
"""Chooses a step's budget, given the loop and the most that makes sense."""


@dataclass
class Loop:
    """Runs requests to their end. Everything that is not written yet is NaN.

    Like an engine with two steps in flight, the loop learns late that a request has ended: it plans two more steps
    for it, and checks that they give nothing. Requests join when a slot is free, after random delays; prompts are
    cut at random; a request may sit out a step, and the drafter may.
    """

    cfg: ModelConfig
    params: ModelParams
    programs: Programs
    budget: Budget
    seed: int = 0
    skips_drafter: float = 0.1
    sits_out: float = 0.1
    shortest_chunk: int = 1  # where the prompt and the step have so many left
    longest_chunk: int = 12
    min_depth: int = 0
    row_format: RowFormat = RowFormat.PLAIN
    confidences: np.ndarray = field(init=False)  # [SLOTS, G] of the last proposals
    stale: np.ndarray = field(init=False)  # [SLOTS, G] of the proposals before
    mixed_chunks: set[int] = field(
        init=False
    )  # lengths of prompt chunks that had decoding rows beside them

    def __post_init__(self) -> None:
        per_page = page_tokens(self.cfg)
        held = -(-MAX_LEN // per_page)
        self.rng = np.random.default_rng(self.seed)
        pages = self.rng.permutation(SLOTS * held)
        self.page_table = pages.reshape(SLOTS, held).astype(np.int32)
        self.draft_len = self.cfg.draft.block_size if self.cfg.draft and self.programs.draft else 0
        self.state = init_state(
            self.cfg,
            slots=SLOTS,
            geometry=PageGeometry(per_page, SLOTS * held, held),
            with_drafter=self.programs.draft is not None,
            row_format=self.row_format,
            fill=jnp.nan,
        )
        self.confidences = np.ones((SLOTS, self.draft_len), np.float32)
        self.stale = self.confidences
        self.mixed_chunks = set()

    def run(self, requests: Sequence[Request]) -> None:
        """Continue all `requests` to their ends, in place."""
        waiting, running = list(requests), []
        while waiting or running:
            free = [s for s in range(SLOTS) if s not in {r.slot for r in running}]
            while waiting and free and (not running or self.rng.random() < 0.4):
                request = waiting.pop(0)
                request.slot = free.pop(self.rng.integers(len(free)))
                self.confidences[request.slot] = 1
                running.append(request)
            order = self.rng.permutation(len(running))
            chosen = [running[i] for i in order if self.rng.random() >= self.sits_out]
            if chosen:
                self.step(chosen)
            running = [r for r in running if r.late_steps <= 2]

    def step(self, requests: Sequence[Request]) -> None:
        """One step for `requests`, in this row order."""
        room = TOKENS - len(requests)
        rows: list[RowPlan] = []
        for request in requests:
            rows.append(self._row(request, room + 1))
            room -= rows[-1].num_tokens - 1
        if any(row.prompt_ids is None for row in rows):
            self.mixed_chunks |= {row.num_tokens for row in rows if row.prompt_ids is not None}
        most = min(room, sum(row.draft_cap for row in rows))
        budget = self.budget(self, most)
        assert 0 <= budget <= most
        drafts = self.draft_len > 0 and self.rng.random() >= self.skips_drafter
        plan = StepPlan(
            rows=tuple(rows),
            page_table=self.page_table,
            budget=budget,
            bucket=TOKENS,
            drafts=drafts,
            min_depth=self.min_depth,
        )
        packed = pack(plan, rows=SLOTS)
        self.state, outputs = self.programs.verify(self.params, self.state, packed)
        if drafts:
            assert self.programs.draft is not None
            self.state, confidences = self.programs.draft(self.params, self.state, packed.rows)
            self.stale = self.confidences
            self.confidences = self.confidences.copy()
            self.confidences[[row.slot for row in rows]] = np.asarray(confidences)[: len(rows)]
        self._read(requests, rows, outputs)

    def _row(self, request: Request, room: int) -> RowPlan:
        chunk, samples, start = None, True, 0
        if request.fed < len(request.prompt):
            start = request.fed
            if request.sampling.get("wants_prompt_logprobs") and start:
                # Fed again, because its row describes the token after it, which the last chunk lacked.
                start -= 1
                request.prompt_logprobs.pop()
            longest = min(self.longest_chunk, room, len(request.prompt) - start)
            end = start + self.rng.integers(min(self.shortest_chunk, longest), longest + 1)
            chunk = np.asarray(request.prompt[start:end], np.int32)
            request.fed = end
            samples = end == len(request.prompt)
        prompt_len = len(request.prompt) if request.prompt_len is None else request.prompt_len
        return RowPlan(
            slot=request.slot,
            prompt_ids=chunk,
            start=start,
            samples=samples,
            draft_cap=self.draft_len if chunk is None else 0,
            limit=request.limit,
            prompt_len=prompt_len,
            **request.sampling,
        )

    def _read(
        self, requests: Sequence[Request], rows: Sequence[RowPlan], outputs: DeviceOutputs
    ) -> None:
        ints = np.asarray(outputs.ints)
        logprobs, prompt_logprobs = _each(outputs.logprobs), _each(outputs.prompt_logprobs)
        for i, (request, row) in enumerate(zip(requests, rows)):
            count, finish, verify_len = ints[i, -3:].tolist()
            if row.wants_prompt_logprobs and row.prompt_ids is not None:
                request.prompt_logprobs += prompt_logprobs[: len(row.prompt_ids)]
                del prompt_logprobs[: len(row.prompt_ids)]
            if request.finish is not RowFinish.RUNNING:
                assert (count, finish, verify_len) == (0, RowFinish.RUNNING, 0)
                request.late_steps += 1
                continue
            if not row.samples:
                assert (count, verify_len) == (0, 0)
            request.tokens += ints[i, :count].tolist()
            first = i * (ints.shape[1] - 3)
            request.logprobs += logprobs[first : first + count]
            request.finish = RowFinish(finish)
            request.late_steps += request.finish is not RowFinish.RUNNING
            if row.samples:
                request.verify_lens.append(verify_len)
                request.accept_lens.append(max(count - 1, 0))


def _each(logprobs: DeviceLogprobs) -> list[Logprob]:
    fields = (logprobs.chosen, logprobs.top_ids, logprobs.top)
    return [Logprob(*row) for row in zip(*map(np.asarray, fields))]


def no_budget(loop: Loop, most: int) -> int:
    """Verify nothing."""
    return 0


def full_budget(loop: Loop, most: int) -> int:
    """Verify all that fits."""
    return most


def random_budget(loop: Loop, most: int) -> int:
    """Verify any number."""
    return int(loop.rng.integers(0, most + 1))


def stale_budget(loop: Loop, most: int) -> int:
    """As many as the proposals before the pending ones had likely survivors."""
    return min(most, int((np.cumprod(loop.stale, axis=1) > 0.2).sum()))


BUDGETS: dict[str, Budget] = {
    "none": no_budget,
    "full": full_budget,
    "random": random_budget,
    "stale": stale_budget,
}
