"""Who is in a step, with how many tokens; steps are dispatched and landed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.serving.policy import StepSize
from dspark_jax.serving.prefix_cache import PrefixCache
from dspark_jax.serving.scheduler import Schedule, Scheduler
from dspark_jax.serving.sequence import Sequence, Status
from dspark_jax.serving.step import mark_dispatched
from tests.serving.engine.fake_model import EOS
from tests.serving.engine.harness import make_request

MAX_MODEL_LEN = 64


def make_scheduler(**changes) -> Scheduler:
    fields = dict(
        num_slots=4,
        max_num_batched_tokens=16,
        max_logit_rows=16,
        max_model_len=MAX_MODEL_LEN,
        draft_cap=3,
        min_depth=3,
        pages=PrefixCache(64, page_size=4),
    )
    return Scheduler(**(fields | changes))


def make_sequence(request_id: str = "r", num_prompt: int = 3, **sampling) -> Sequence:
    request = make_request(request_id, tuple(range(2, 2 + num_prompt)), **sampling)
    return Sequence(request, max_model_len=MAX_MODEL_LEN, eos_token_id=EOS, seed=0)


def dispatch(scheduler: Scheduler, number: int = 0, *, drafts: bool = True) -> Schedule:
    schedule = scheduler.schedule()
    scheduler.on_dispatch(schedule)
    mark_dispatched(schedule, StepSize(schedule.max_budget, drafts=drafts), number)
    return schedule


def land(schedule: Schedule, *tokens: list[int]) -> None:
    """Commit `tokens` to the rows, in order."""
    for scheduled, token_ids in zip(schedule.rows, tokens, strict=True):
        scheduled.sequence.on_landing(scheduled.min_growth, scheduled.max_growth, token_ids)


def shape(schedule: Schedule) -> list[tuple[str, int, int]]:
    """Id, tokens and offered drafts of each row."""
    return [(r.sequence.request.request_id, r.num_tokens, r.row.draft_cap) for r in schedule.rows]


def test_requests_are_admitted_in_order_while_slots_last() -> None:
    scheduler = make_scheduler(num_slots=2)
    for name in "abc":
        scheduler.add(make_sequence(name))
    assert shape(dispatch(scheduler)) == [("a", 3, 0), ("b", 3, 0)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_long_prompt_is_fed_in_chunks_and_only_the_last_samples() -> None:
    scheduler = make_scheduler(draft_cap=0)
    scheduler.add(make_sequence("a", num_prompt=38))
    chunks = [dispatch(scheduler, t).rows[0].row for t in range(3)]
    assert [(c.start, len(c.prompt_ids), c.samples) for c in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 6, True),
    ]
    np.testing.assert_array_equal(
        np.concatenate([c.prompt_ids for c in chunks]), np.arange(2, 40, dtype=np.int32)
    )


def test_prompts_ride_with_decodes_which_come_first() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"))
    dispatch(scheduler, 0)
    scheduler.add(make_sequence("b", num_prompt=30))
    schedule = dispatch(scheduler, 1)
    assert shape(schedule) == [("a", 1, 3), ("b", 12, 0)]
    assert schedule.num_tokens + schedule.num_draft_tokens == 16


def test_drafts_leave_waiting_prompts_a_share_of_the_step() -> None:
    scheduler = make_scheduler(num_slots=5)
    for name in "abcd":
        scheduler.add(make_sequence(name, num_prompt=1))
    dispatch(scheduler, 0)
    assert shape(dispatch(scheduler, 1)) == [(name, 1, 3) for name in "abcd"]
    scheduler.add(make_sequence("e", num_prompt=30))
    # 16 tokens: a quarter for the prompt, 4 anchors, and 8 drafts for four requests.
    assert shape(dispatch(scheduler, 2)) == [*((name, 1, 2) for name in "abcd"), ("e", 4, 0)]


@pytest.mark.parametrize(("min_depth", "num_prompt_tokens"), [(0, 12), (1, 12), (2, 10)])
def test_prompts_go_before_most_optional_drafts(min_depth: int, num_prompt_tokens: int) -> None:
    scheduler = make_scheduler(min_depth=min_depth)
    for name in "ab":
        scheduler.add(make_sequence(name))
    land(dispatch(scheduler), [5], [6])
    scheduler.add(make_sequence("c", num_prompt=20))
    schedule = dispatch(scheduler)
    # 16 tokens; 2 decode, and an eighth, or what must be verified, is left to drafts. All are offered for it.
    assert shape(schedule) == [("a", 1, 3), ("b", 1, 3), ("c", num_prompt_tokens, 0)]
    assert (schedule.num_draft_tokens, schedule.max_budget) == (6, 14 - num_prompt_tokens)


def test_optional_drafts_are_all_offered_where_a_step_holds_a_part() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, min_depth=0)
    for name in "abc":
        scheduler.add(make_sequence(name, num_prompt=2))
    land(dispatch(scheduler), [5], [6], [7])
    schedule = dispatch(scheduler)
    assert shape(schedule) == [("a", 1, 3), ("b", 1, 3), ("c", 1, 3)]
    assert (schedule.num_draft_tokens, schedule.max_budget) == (9, 5)


def test_drafts_are_offered_only_after_a_step_that_drafted() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence())
    dispatch(scheduler, 0, drafts=False)
    assert shape(dispatch(scheduler, 1)) == [("r", 1, 0)]
    assert shape(dispatch(scheduler, 2)) == [("r", 1, 3)]


def test_drafts_stop_at_the_limit_of_the_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(max_tokens=3))
    prompt = dispatch(scheduler, 0)
    land(prompt, [9])
    # Two more tokens may come: one draft and the target's own.
    decode = dispatch(scheduler, 1)
    assert shape(decode) == [("r", 1, 1)]
    # At least one of them comes, so the next step can't use a draft, and the one after can't do anything.
    last = dispatch(scheduler, 2)
    assert shape(last) == [("r", 1, 0)]
    assert dispatch(scheduler, 3).rows == []


def test_pages_cover_what_two_steps_in_flight_can_write() -> None:
    pages = PrefixCache(64, page_size=1)
    scheduler = make_scheduler(pages=pages, num_slots=1, max_num_batched_tokens=4)
    sequence = make_sequence(num_prompt=4)
    scheduler.add(sequence)
    dispatch(scheduler, 0)
    for t in (1, 2):
        dispatch(scheduler, t)
        # The prompt, the anchor, and 3 drafts each of which may be kept, for every decode so far.
        assert len(sequence.pages) >= 4 + 4 * t
    held = scheduler.page_table.snapshot()[sequence.slot, : len(sequence.pages)]
    np.testing.assert_array_equal(held, sequence.pages)


def test_the_youngest_is_preempted_and_waits_for_its_steps() -> None:
    preempted: list[Sequence] = []
    pages = PrefixCache(8, page_size=4)
    scheduler = make_scheduler(pages=pages, draft_cap=0, on_preempt=preempted.append)
    old, young = make_sequence("old", 13, max_tokens=16), make_sequence("young", 13, max_tokens=16)
    scheduler.add(old)
    scheduler.add(young)
    first = dispatch(scheduler, 0)
    assert shape(first) == [("old", 13, 0), ("young", 3, 0)]
    second = dispatch(scheduler, 1)
    land(first, [20], [])
    land(second, [21], [30])
    last = None
    for t in range(2, 20):
        last = dispatch(scheduler, t)
        if preempted:
            break
        land(last, *([22] for _ in last.rows))
    assert preempted == [young]
    assert shape(last) == [("old", 1, 0)]
    assert young.status is Status.WAITING
    assert (young.slot, young.pages) == (-1, [])
    assert len(old.pages) + pages.num_free == 8


def test_a_preempted_request_is_fed_prompt_and_output_before_any_newcomer() -> None:
    pages = PrefixCache(4, page_size=4)
    scheduler = make_scheduler(pages=pages, draft_cap=0)
    old, young = make_sequence("old", 6, max_tokens=8), make_sequence("young", 6, max_tokens=8)
    scheduler.add(old)
    scheduler.add(young)
    land(dispatch(scheduler, 0), [20], [30])
    land(dispatch(scheduler, 1), [21], [31])
    in_flight = dispatch(scheduler, 2)
    scheduler.add(make_sequence("new", 1))
    assert shape(dispatch(scheduler, 3)) == [("old", 1, 0)]
    scheduler.finish(old)
    # Pages and slots are free, but the row in flight decides how the request goes on.
    assert dispatch(scheduler, 4).rows == []
    land(in_flight, [22], [32])
    row = dispatch(scheduler, 5).rows[0]
    assert row.sequence is young
    assert row.row.start == 0
    assert row.row.prompt_len == 6
    np.testing.assert_array_equal(row.row.prompt_ids, [*range(2, 8), 30, 31, 32])


def test_a_finished_request_frees_its_slot_and_pages_at_once() -> None:
    scheduler = make_scheduler(num_slots=1)
    first, second = make_sequence("first"), make_sequence("second")
    scheduler.add(first)
    scheduler.add(second)
    dispatch(scheduler, 0)
    slot = first.slot
    scheduler.finish(first)
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert shape(dispatch(scheduler, 1)) == [("second", 3, 0)]
    assert second.slot == slot


def test_a_waiting_request_can_be_finished() -> None:
    scheduler = make_scheduler(num_slots=1)
    first, second = make_sequence("first"), make_sequence("second")
    scheduler.add(first)
    scheduler.add(second)
    dispatch(scheduler, 0)
    scheduler.finish(second)
    scheduler.finish(first)
    assert not scheduler.has_work


def test_scored_prompts_are_limited_by_logit_rows() -> None:
    scheduler = make_scheduler(max_logit_rows=6)
    scheduler.add(make_sequence("a"))
    dispatch(scheduler, 0)
    scheduler.add(make_sequence("scored", num_prompt=9, prompt_logprobs=0))
    chunks = []
    for t in range(1, 5):
        schedule = dispatch(scheduler, t)
        row = next(r.row for r in schedule.rows if r.sequence.request.request_id == "scored")
        if row.prompt_ids is not None:
            chunks.append((row.start, len(row.prompt_ids), schedule.max_budget))
    # One row belongs to the other request; a chunk starts with the last token of the one before it.
    assert chunks == [(0, 5, 0), (4, 5, 0)]


def test_logit_rows_bound_the_budget() -> None:
    scheduler = make_scheduler(max_logit_rows=5)
    for name in "abcd":
        scheduler.add(make_sequence(name))
    dispatch(scheduler, 0)
    schedule = dispatch(scheduler, 1)
    assert schedule.num_draft_tokens == 12
    assert schedule.max_budget == 1


def test_a_request_that_never_fits_is_refused() -> None:
    scheduler = make_scheduler(pages=PrefixCache(4, page_size=4))
    scheduler.check(make_sequence(num_prompt=10, max_tokens=7))
    with pytest.raises(ValueError, match="needs 5 cache pages, there are 4"):
        scheduler.check(make_sequence(num_prompt=10, max_tokens=8))


@pytest.mark.parametrize(
    "changes", [dict(num_slots=17), dict(draft_cap=16), dict(max_logit_rows=3)]
)
def test_a_step_that_cannot_hold_its_requests_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"tokens and .* rows of logits per step"):
        make_scheduler(**changes)


def test_scoring_a_prompt_needs_two_rows_of_logits() -> None:
    scheduler = make_scheduler(num_slots=1, max_logit_rows=1, draft_cap=0)
    scheduler.check(make_sequence(num_prompt=1, prompt_logprobs=0))
    with pytest.raises(ValueError, match=r"needs steps with 2 tokens .* these have 16 and 1"):
        scheduler.check(make_sequence(num_prompt=2, prompt_logprobs=0))
