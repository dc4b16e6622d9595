"""Which requests take part in a step, with how many tokens, and who holds which slot and pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dspark_jax.budget import NO_PROPOSAL
from dspark_jax.budget.step_room import reserved_for_drafts, room_for_drafts
from dspark_jax.decode.plan import RowPlan
from dspark_jax.serving.pages import PageTable
from dspark_jax.serving.prefix_cache import PrefixCache, extend_digests
from dspark_jax.serving.sequence import Sequence, Status

# Tokens with which a chunk of a scored prompt advances: it begins with the last token of the chunk before.
_LEAST_SCORED = 2


@dataclass(slots=True)
class ScheduledRow:
    """One sequence in one step. Once dispatched it commits between `min_growth` and `max_growth` tokens."""

    sequence: Sequence
    row: RowPlan
    num_tokens: int  # besides drafts
    min_growth: int = 0
    max_growth: int = 0


class SnapshotMove(NamedTuple):
    """The rings of a sequence are copied to, or from, a place among the snapshots."""

    sequence: Sequence
    place: int


@dataclass(slots=True)
class Schedule:
    """The rows of a step. Its tokens and `max_budget` drafts fit `max_num_batched_tokens` together.

    Before the step `restores` fill the rings of sequences that start behind cached pages.
    """

    rows: list[ScheduledRow]
    num_tokens: int  # besides drafts
    num_draft_tokens: int  # offered
    num_reserved: int  # drafts that prompts leave room for
    num_logit_rows: int  # besides drafts
    max_budget: int = 0
    restores: list[SnapshotMove] = field(default_factory=list)
    filling: list[ScheduledRow] = field(default_factory=list)  # rows whose pages are to be cached


class Scheduler:
    """Continuous batching: running requests first, then the queue in order of arrival.

    Prompts are fed in chunks beside decoding requests. When pages run out the youngest running request is
    pre-empted: it gives up slot and pages, waits until its steps in flight have landed, and is fed again.
    The oldest request therefore always advances.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        max_logit_rows: int,
        max_model_len: int,
        draft_cap: int,
        min_depth: int,
        pages: PrefixCache,
        on_admit: Callable[[Sequence], None] = lambda sequence: None,
        on_preempt: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """
        Args:
            num_slots: requests that run at once.
            max_num_batched_tokens: tokens of a step, verified drafts included.
            max_logit_rows: rows of logits of a step.
            max_model_len: positions of a slot's page table.
            draft_cap: drafts that a request offers for verification, 0 without a drafter.
            min_depth: those of them that must be verified; prompts go before most of the others.
            pages: the allocator, and what it remembers; nobody else takes pages from it.
            on_admit: called for a sequence that has just received its slot.
            on_preempt: called for a sequence that has just lost it.

        Raises ValueError if one token of every slot doesn't fit a step.
        """
        if min(max_num_batched_tokens, max_logit_rows) < max(num_slots, draft_cap + 1):
            raise ValueError(
                f"{num_slots} requests and a draft of {draft_cap} need more than "
                f"{max_num_batched_tokens} tokens and {max_logit_rows} rows of logits per step"
            )
        self.pages = pages
        self.page_table = PageTable(num_slots, pages.pages_for(max_model_len))
        self._max_tokens = max_num_batched_tokens
        self._max_logit_rows = max_logit_rows
        self._draft_cap = draft_cap
        self._min_depth = min_depth
        self._on_admit = on_admit
        self._on_preempt = on_preempt
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Both in order of arrival: the queue is served from its front, and who is pre-empted is the youngest
        # of the running and older than the whole queue.
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, sequence: Sequence) -> None:
        """Raise ValueError if the sequence could not run even alone. Reads constants only: any thread may ask."""
        # The token at the limit is never fed.
        num_pages = self.pages.pages_for(sequence.limit - 1)
        if num_pages > self.pages.num_pages:
            raise ValueError(
                f"a request of up to {sequence.limit} tokens needs {num_pages} cache pages, "
                f"there are {self.pages.num_pages}; lower its max_tokens or raise --num-pages"
            )
        least = min(len(sequence.prompt), _LEAST_SCORED)
        if sequence.wants_prompt_logprobs and min(self._max_tokens, self._max_logit_rows) < least:
            raise ValueError(
                f"prompt_logprobs needs steps with {least} tokens and rows of logits, these have "
                f"{self._max_tokens} and {self._max_logit_rows}; raise --max-num-seqs"
            )

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, which `check` accepts, at the end of the queue."""
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free what it holds."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        sequence.leave(Status.FINISHED)

    def schedule(self) -> Schedule:
        """Choose the rows of the next step, reserving the pages they may write. Empty if nothing can run."""
        decoding, was_preempted = self._reserve_decodes()
        prompts: list[Sequence] = []
        if len(decoding) < len(self._running):
            prompts = [s for s in self._running if not s.is_decoding]
        has_prompts = bool(prompts or (self._waiting and self._free_slots))
        schedule = self._place_decodes(decoding, has_prompts)
        # Not after a pre-emption, which would hand the pages just freed to the one that lost them.
        if self._place_prompts(schedule, prompts) and not was_preempted:
            self._admit(schedule)
        schedule.max_budget = min(
            schedule.num_draft_tokens,
            self._max_tokens - schedule.num_tokens,
            self._max_logit_rows - schedule.num_logit_rows,
        )
        return schedule

    def on_dispatch(self, schedule: Schedule) -> list[SnapshotMove]:
        """Let later steps find the pages that a dispatched one fills; returns the rings to save behind it.

        Not before, because the page table of the step must name the pages into which it writes.
        """
        saves = []
        for scheduled in schedule.filling:
            sequence, end = scheduled.sequence, scheduled.row.start + scheduled.num_tokens
            self._remember(sequence, end)
            if end in sequence.cuts:
                place = self.pages.new_place(sequence.digests[end // self.pages.page_size - 1])
                if place is not None:
                    saves.append(SnapshotMove(sequence, place))
        return saves

    def forget_prefixes(self) -> None:
        """Let no later request start behind anything that is cached now."""
        self.pages.clear()

    def _remember(self, sequence: Sequence, end: int) -> None:
        """Cache the pages that the sequence has filled up to `end` tokens, or share those that hold the same."""
        size = self.pages.page_size
        for index in range(sequence.num_remembered // size, end // size):
            own = sequence.pages[index]
            page = self.pages.remember(sequence.digests[index], own)
            if page != own:
                sequence.pages[index] = page
                self.page_table.replace(sequence.slot, index, page)
        sequence.num_remembered = end // size * size

    def _reserve_decodes(self) -> tuple[list[tuple[Sequence, int]], bool]:
        """Decoding sequences with the drafts each can offer, and whether one was pre-empted for pages."""
        decoding: list[tuple[Sequence, int]] = []
        num_running, page_size = len(self._running), self.pages.page_size
        for sequence in self._running:  # a pre-emption only cuts off its end
            if not sequence.is_decoding or sequence.is_surely_ending:
                continue
            cap, limit = 0, sequence.limit
            if sequence.proposal_serial != NO_PROPOSAL:
                cap = min(self._draft_cap, limit - sequence.min_len - 1)
            num_tokens = min(sequence.max_len + cap, limit - 1)
            # Nearly always the pages it has are enough.
            num_missing = num_tokens - page_size * len(sequence.pages)
            if num_missing <= 0 or self._grow(sequence, self.pages.pages_for(num_missing)):
                decoding.append((sequence, cap))
        return decoding, len(self._running) < num_running

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence `count` more pages, pre-empting younger ones for them; False if it fell itself."""
        while self.pages.num_free < count:
            if self._preempt_youngest() is sequence:
                return False
        self._give_pages(sequence, count)
        return True

    def _give_pages(self, sequence: Sequence, count: int) -> None:
        self._add_pages(sequence, self.pages.allocate(count))

    def _add_pages(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.pages.extend(pages)
        self.page_table.append(sequence.slot, pages)

    def _preempt_youngest(self) -> Sequence:
        sequence = self._running.pop()
        self._release(sequence)
        sequence.leave(Status.WAITING)
        self._waiting.appendleft(sequence)
        self._on_preempt(sequence)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        # At once, though steps in flight may still write there: those given the slot and the pages next run later.
        self.pages.free(sequence.pages)
        self.page_table.clear(sequence.slot)
        self._free_slots.append(sequence.slot)

    def _place_decodes(self, decoding: list[tuple[Sequence, int]], has_prompts: bool) -> Schedule:
        """One token for every decoding sequence; all its drafts if some are optional, else what the step holds."""
        num_rows = len(decoding)
        room = room_for_drafts(num_rows, self._max_tokens, has_prompts=has_prompts)
        num_drafts = sum([cap for _, cap in decoding]) if self._draft_cap else 0
        if self._min_depth < self._draft_cap:
            num_floor = 0
            if self._min_depth:
                num_floor = sum(min(cap, self._min_depth) for _, cap in decoding)
            num_reserved = reserved_for_drafts(num_drafts, num_floor, room, self._max_tokens)
        else:
            if num_drafts > room:
                level = room // num_rows
                decoding = [(sequence, min(cap, level)) for sequence, cap in decoding]
                num_drafts = sum(cap for _, cap in decoding)
            num_reserved = num_drafts
        rows = [ScheduledRow(sequence, sequence.decode_row(cap), 1) for sequence, cap in decoding]
        return Schedule(rows, num_rows, num_drafts, num_reserved, num_rows)

    def _place_prompts(self, schedule: Schedule, prompts: list[Sequence]) -> bool:
        """Chunks of the prompts in order; False if the step is full before the last of them has a row."""
        for sequence in prompts:
            is_scored = sequence.wants_prompt_logprobs
            num_tokens = self._chunk_len(schedule, sequence.num_until_cut, is_scored)
            if not num_tokens:
                return False
            scheduled = ScheduledRow(sequence, sequence.prompt_row(num_tokens), num_tokens)
            schedule.rows.append(scheduled)
            # A scored prompt feeds tokens twice, so it may write to a page that it has filled.
            if self.pages.num_snapshots and not is_scored:
                schedule.filling.append(scheduled)
            schedule.num_tokens += num_tokens
            schedule.num_logit_rows += num_tokens if is_scored else 1
        return True

    def _chunk_len(self, schedule: Schedule, num_unfed: int, is_scored: bool) -> int:
        """Tokens of a prompt that the step still holds, 0 if too few to advance."""
        room = self._max_tokens - schedule.num_tokens - schedule.num_reserved
        logit_room = self._max_logit_rows - schedule.num_logit_rows
        num_tokens = min(num_unfed, room)
        if is_scored:
            num_tokens = min(num_tokens, logit_room)
            return num_tokens if num_tokens >= min(num_unfed, _LEAST_SCORED) else 0
        return num_tokens if logit_room else 0

    def _admit(self, schedule: Schedule) -> None:
        """Take sequences from the front of the queue while a slot, pages and room in the step are left."""
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            if sequence.num_in_flight:
                return  # its last tokens, which it starts from, haven't landed
            if not self._chunk_len(schedule, sequence.num_known, sequence.wants_prompt_logprobs):
                return
            cached, cuts = self._find_prefix(sequence)
            # With the growth of two steps, so that it isn't pre-empted as soon as it decodes.
            num_tokens = min(sequence.num_known + 2 * (self._draft_cap + 1), sequence.limit - 1)
            num_new = self.pages.pages_for(num_tokens) - len(cached)
            if num_new > self.pages.num_free_beside(cached):
                return
            self._running.append(self._waiting.popleft())
            sequence.admit(
                self._free_slots.pop(),
                num_cached=len(cached) * self.pages.page_size,
                cuts=cuts,
            )
            if cached:
                self._add_pages(sequence, self.pages.hold(cached))
                place = self.pages.place_of(cached[-1])
                schedule.restores.append(SnapshotMove(sequence, place))
            self._give_pages(sequence, num_new)
            self._on_admit(sequence)
            self._place_prompts(schedule, [sequence])

    def _find_prefix(self, sequence: Sequence) -> tuple[list[bytes], frozenset[int]]:
        """The cached pages behind which a sequence starts, by digest, and the lengths at which to save its rings.

        They are saved behind the last full page, where the next turn of a conversation will start, and where the
        known tokens part from what is cached, because others will share what this one has shared. One token is
        always left to be fed.
        """
        if not self.pages.num_snapshots or sequence.wants_prompt_logprobs:
            return [], frozenset()
        size = self.pages.page_size
        if len(sequence.digests) < sequence.num_known // size:
            extend_digests(sequence.digests, sequence.known_ids(), size)
        most = (sequence.num_known - 1) // size
        found = self.pages.find(sequence.digests[:most])
        cuts = {size * end for end in (found.num_pages, most) if end > found.num_resumable}
        return sequence.digests[: found.num_resumable], frozenset(cuts)
