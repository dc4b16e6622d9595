"""An executor without a device: the semantics of `decode/plan.py` over the hash model, strict about every plan.

The context of a request exists only in the cache pages, so that a page overwritten, lost or read out of order
changes the tokens that follow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dspark_jax.budget import CostTable, allocate
from dspark_jax.decode.plan import RowFinish, RowPlan, StepOutputs, StepPlan
from tests.serving.engine.fake_model import VOCAB_SIZE, next_token, score, stack_scores


@dataclass
class Slot:
    """Device state of one slot."""

    position: int = 0  # tokens that are fed and kept
    anchor: int = -1
    has_ended: bool = True
    drafts: list[int] = field(default_factory=list)
    restored: list[int] | None = None  # the context that its rings were saved behind
    confidences: np.ndarray | None = None


class FakeStep:
    """A step that has been computed and lands when it is fetched."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan, outputs: StepOutputs) -> None:
        self._executor, self._plan, self._outputs = executor, plan, outputs
        self._table = plan.page_table.copy()
        self._lands_at = time.monotonic() + executor.step_s

    def is_ready(self) -> bool:
        return time.monotonic() >= self._lands_at

    def fetch(self) -> StepOutputs:
        time.sleep(max(0.0, self._lands_at - time.monotonic()))
        assert self._executor.in_flight.pop(0) is self, "steps must be fetched in order, once"
        np.testing.assert_array_equal(self._plan.page_table, self._table)
        if self._executor.fail_at_fetch is not None:
            raise self._executor.fail_at_fetch
        return self._outputs


class FakeExecutor:
    """`Executor` over `next_token`. A draft agrees with the model with probability `agreement`."""

    def __init__(
        self,
        *,
        num_slots: int = 4,
        draft_len: int = 3,
        buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
        num_pages: int = 64,
        page_size: int = 4,
        max_model_len: int = 64,
        num_snapshots: int = 4,
        logit_rows: int = 32,
        agreement: float = 0.6,
        seed: int = 0,
        step_s: float = 0.0,
        cost_table: CostTable | None = None,
    ) -> None:
        self.num_slots, self.draft_len, self.buckets = num_slots, draft_len, buckets
        self.num_pages, self.page_size, self.max_model_len = num_pages, page_size, max_model_len
        self.logit_rows, self.agreement, self.step_s = logit_rows, agreement, step_s
        self.cost_table = cost_table
        self.num_snapshots = num_snapshots
        self.num_saves = self.num_restores = 0
        self.random = random.Random(seed)
        self.in_flight: list[FakeStep] = []
        self.plans: list[StepPlan] = []
        self.most_in_flight = 0
        self.num_warm_ups = 0
        self.non_finite_seeds: set[int] = set()
        self.fail_at_fetch: Exception | None = None
        self.on_dispatch: Callable[[StepPlan], None] = lambda plan: None
        self._cache = np.full((num_pages, page_size), -1, np.int64)
        self._slots = [Slot() for _ in range(num_slots)]
        self._snapshots: dict[int, list[int]] = {}

    def max_logit_rows(self, bucket: int) -> int:
        return min(bucket, self.logit_rows)

    def warm_up(self) -> None:
        self.num_warm_ups += 1

    def dispatch(self, plan: StepPlan) -> FakeStep:
        assert len(self.in_flight) < 2, "more than two steps in flight"
        self.on_dispatch(plan)
        self._check(plan)
        self.plans.append(plan)
        step = FakeStep(self, plan, self._run(plan))
        self.in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return step

    def save_snapshot(self, slot: int, place: int) -> None:
        assert 0 <= place < self.num_snapshots
        position = self._slots[slot].position
        assert position % self.page_size == 0
        self._snapshots[place] = self._read(self.plans[-1], slot, position)
        self.num_saves += 1

    def restore_snapshot(self, slot: int, place: int) -> None:
        context = self._snapshots[place]
        self._slots[slot] = Slot(position=len(context), has_ended=False, restored=context)
        self.num_restores += 1

    def set_counts(self, slot: int, output: np.ndarray, prompt: np.ndarray) -> None:
        """Nothing is penalised here, but what was skipped must have been counted."""
        context = self._slots[slot].restored
        assert context is not None
        in_prompt = np.flatnonzero(prompt).tolist()
        assert set(context) == {*in_prompt, *np.flatnonzero(output).tolist()}
        assert output.sum() + len(in_prompt) <= len(context)

    def _check(self, plan: StepPlan) -> None:
        slots = [row.slot for row in plan.rows]
        assert plan.rows
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.num_slots for slot in slots)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        assert plan.bucket in self.buckets
        assert num_tokens + plan.budget <= plan.bucket
        num_draft_tokens = sum(row.draft_cap for row in plan.rows)
        assert 0 <= plan.budget <= num_draft_tokens
        scored = sum(row.num_tokens - 1 for row in plan.rows if row.wants_prompt_logprobs)
        assert len(plan.rows) + plan.budget + scored <= self.max_logit_rows(plan.bucket)
        max_pages = -(-self.max_model_len // self.page_size)
        assert plan.page_table.shape == (self.num_slots, max_pages)
        assert plan.page_table.dtype == np.int32
        for held in plan.page_table:
            held = held[held >= 0].tolist()
            assert len(set(held)) == len(held), "a slot has a page twice"
        assert plan.drafts <= (self.draft_len > 0)

    def _run(self, plan: StepPlan) -> StepOutputs:
        num_rows, stride = len(plan.rows), self.draft_len + 1
        tokens = np.full((num_rows, stride), -1, np.int32)
        num_tokens = np.zeros(num_rows, np.int32)
        finish = np.zeros(num_rows, np.int32)
        confidences = np.full((num_rows, self.draft_len), np.nan, np.float32)
        logprobs, prompt_logprobs = [], []
        verify_lens = self._admit_drafts(plan)
        for r, row in enumerate(plan.rows):
            slot = self._slots[row.slot]
            if row.prompt_ids is None:
                new, finish[r] = self._decode(plan, row, slot, int(verify_lens[r]))
            else:
                new, finish[r] = self._prompt(plan, row, slot)
                if row.wants_prompt_logprobs:
                    prompt_logprobs += self._score_prompt(plan, row)
            tokens[r, : len(new)], num_tokens[r] = new, len(new)
            logprobs += self._score_output(plan, row, slot, new)
            if row.samples:
                slot.drafts = []
            if plan.drafts and row.samples and not slot.has_ended:
                slot.drafts = self._draft(plan, row, slot)
                confidences[r] = [self.random.random() for _ in range(self.draft_len)]
                slot.confidences = confidences[r].copy()
        return StepOutputs(
            tokens=tokens,
            num_tokens=num_tokens,
            finish=finish,
            verify_lens=verify_lens,
            confidences=confidences,
            logprobs=stack_scores(logprobs) if any(r.wants_logprobs for r in plan.rows) else None,
            prompt_logprobs=stack_scores(prompt_logprobs) if prompt_logprobs else None,
        )

    def _admit_drafts(self, plan: StepPlan) -> np.ndarray:
        """The best `budget` pending drafts, as far as the rows still have some within cap and limit."""
        lens, confidences = [], np.zeros((len(plan.rows), max(self.draft_len, 1)), np.float32)
        for r, row in enumerate(plan.rows):
            slot = self._slots[row.slot]
            cap = 0
            if row.prompt_ids is None and not slot.has_ended:
                cap = min(row.draft_cap, len(slot.drafts), row.limit - slot.position - 2)
                if slot.drafts:
                    confidences[r] = slot.confidences
                else:
                    assert row.draft_cap == 0, "drafts are offered of a slot that has none"
            lens.append(max(cap, 0))
        draft_lens = np.array(lens)
        budget = min(plan.budget, int(draft_lens.sum()))
        return allocate(confidences, draft_lens, budget, min_depth=plan.min_depth)

    def _prompt(self, plan: StepPlan, row: RowPlan, slot: Slot) -> tuple[list[int], RowFinish]:
        assert row.prompt_ids is not None
        assert len(row.prompt_ids) > 0
        if row.start == 0:
            slot.__dict__.update(Slot(has_ended=False).__dict__)
        # A chunk may repeat the last token of the one before it, but leave nothing out.
        assert not slot.has_ended
        assert slot.position - 1 <= row.start <= slot.position
        if slot.restored is not None:
            assert self._read(plan, row.slot, row.start) == slot.restored
            slot.restored = None
        self._write(plan, row.slot, row.start, row.prompt_ids.tolist())
        slot.position = row.start + len(row.prompt_ids)
        if not row.samples:
            return [], RowFinish.RUNNING
        return self._commit(row, slot, [self._sample(plan, row, slot.position)])

    def _decode(
        self, plan: StepPlan, row: RowPlan, slot: Slot, verify_len: int
    ) -> tuple[list[int], RowFinish]:
        if slot.has_ended:
            return [], RowFinish.RUNNING
        fed = [slot.anchor, *slot.drafts[:verify_len]]
        self._write(plan, row.slot, slot.position, fed)
        new: list[int] = []
        for i, draft in enumerate([*fed[1:], None]):
            new.append(self._sample(plan, row, slot.position + 1 + i))
            if new[-1] != draft:
                break
        slot.position += len(new)
        return self._commit(row, slot, new)

    def _commit(self, row: RowPlan, slot: Slot, new: list[int]) -> tuple[list[int], RowFinish]:
        if row.seed in self.non_finite_seeds:
            slot.has_ended = True
            return [], RowFinish.NON_FINITE
        first = slot.position - len(new) + 1
        for i, token in enumerate(new):
            slot.anchor = token
            is_stop = token in row.stop_ids
            if is_stop or first + i + 1 >= row.limit:
                slot.has_ended = True
                slot.position = first + i
                return new[: i + 1], RowFinish.STOP if is_stop else RowFinish.LENGTH
        return new, RowFinish.RUNNING

    def _sample(self, plan: StepPlan, row: RowPlan, num_tokens: int) -> int:
        context = self._read(plan, row.slot, num_tokens)
        return next_token(context, row.seed, stop_ids=row.stop_ids, min_len=row.min_len)

    def _draft(self, plan: StepPlan, row: RowPlan, slot: Slot) -> list[int]:
        context = [*self._read(plan, row.slot, slot.position), slot.anchor]
        drafts: list[int] = []
        for _ in range(self.draft_len):
            token = next_token(
                context + drafts, row.seed, stop_ids=row.stop_ids, min_len=row.min_len
            )
            if self.random.random() > self.agreement:
                token = self.random.randrange(VOCAB_SIZE)
            drafts.append(token)
        return drafts

    def _score_output(self, plan: StepPlan, row: RowPlan, slot: Slot, new: list[int]) -> list:
        scores = [score([], 0)] * (self.draft_len + 1)
        if row.wants_logprobs and new:
            known = [*self._read(plan, row.slot, slot.position), slot.anchor]
            start = len(known) - len(new)
            scores[: len(new)] = [score(known[: start + j], t) for j, t in enumerate(new)]
        return scores

    def _score_prompt(self, plan: StepPlan, row: RowPlan) -> list:
        assert row.prompt_ids is not None
        ids = row.prompt_ids.tolist()
        context = self._read(plan, row.slot, row.start)
        # The token after the last one is in no row of this step: its score is arbitrary.
        return [score(context + ids[: i + 1], t) for i, t in enumerate([*ids[1:], 0])]

    def _write(self, plan: StepPlan, slot: int, start: int, token_ids: list[int]) -> None:
        for position, token_id in enumerate(token_ids, start):
            page = plan.page_table[slot, position // self.page_size]
            assert page >= 0, f"position {position} of slot {slot} has no page"
            assert (plan.page_table == page).sum() == 1, "a page that two slots have is written"
            self._cache[page, position % self.page_size] = token_id

    def _read(self, plan: StepPlan, slot: int, num_tokens: int) -> list[int]:
        pages = plan.page_table[slot, : -(-num_tokens // self.page_size)]
        assert (pages >= 0).all(), f"slot {slot} has no pages for {num_tokens} tokens"
        return self._cache[pages].ravel()[:num_tokens].tolist()
