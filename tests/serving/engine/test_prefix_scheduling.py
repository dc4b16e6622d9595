"""Where prompts start and are cut when pages are cached; steps are dispatched and landed by hand."""

from __future__ import annotations

import numpy as np

from dspark_jax.serving.policy import StepSize
from dspark_jax.serving.prefix_cache import PrefixCache
from dspark_jax.serving.scheduler import Schedule, Scheduler, SnapshotMove
from dspark_jax.serving.sequence import Sequence
from dspark_jax.serving.step import mark_dispatched
from tests.serving.engine.fake_model import EOS
from tests.serving.engine.harness import make_request
from tests.serving.engine.test_scheduler import MAX_MODEL_LEN, land, make_scheduler

SIZE = 4


def make_caching(num_pages: int = 64, num_snapshots: int = 4, **changes) -> Scheduler:
    fields = dict(draft_cap=0, min_depth=0, max_num_batched_tokens=32)
    pages = PrefixCache(num_pages, SIZE, num_snapshots)
    return make_scheduler(pages=pages, **(fields | changes))


def make_sequence(prompt, request_id: str = "r", **sampling) -> Sequence:
    request = make_request(request_id, tuple(prompt), **sampling)
    return Sequence(request, max_model_len=MAX_MODEL_LEN, eos_token_id=EOS, seed=0)


def dispatch(scheduler: Scheduler) -> tuple[Schedule, list[SnapshotMove], np.ndarray]:
    """One step: its schedule, what is saved behind it, and its page table."""
    schedule = scheduler.schedule()
    table = scheduler.page_table.snapshot()
    saves = scheduler.on_dispatch(schedule)
    mark_dispatched(schedule, StepSize(schedule.max_budget, drafts=True), 0)
    return schedule, saves, table


def chunks(scheduler: Scheduler, *sequences: Sequence) -> list[list[tuple[int, int]]]:
    """Start and length of each prompt row, by step, until all these have drawn a token."""
    for sequence in sequences:
        scheduler.add(sequence)
    steps = []
    while not all(sequence.output for sequence in sequences):
        schedule, _, _ = dispatch(scheduler)
        steps.append(
            [(r.row.start, r.num_tokens) for r in schedule.rows if r.row.prompt_ids is not None]
        )
        land(schedule, *([9] if r.row.samples else [] for r in schedule.rows))
    return steps


def run(scheduler: Scheduler, prompt, **sampling) -> list[tuple[int, int]]:
    """Chunks of a request that is alone and finishes."""
    sequence = make_sequence(prompt, **sampling)
    rows = [row for step in chunks(scheduler, sequence) for row in step]
    scheduler.finish(sequence)
    return rows


def test_a_prompt_without_a_full_page_before_its_last_token_is_fed_as_ever() -> None:
    for length in (1, SIZE - 1, SIZE):
        scheduler = make_caching()
        for _ in range(2):
            assert run(scheduler, range(2, 2 + length)) == [(0, length)]


def test_a_longer_prompt_is_cut_behind_its_last_full_page_and_starts_there_the_next_time() -> None:
    scheduler = make_caching()
    prompt = range(2, 12)
    assert run(scheduler, prompt) == [(0, 8), (8, 2)]
    assert run(scheduler, prompt) == [(8, 2)]
    # One token is always fed, and the page that it would fill is not there.
    assert run(scheduler, [*prompt][:8]) == [(0, 4), (4, 4)]
    # The next turn of a conversation saves at its own end.
    turn = [*prompt, *range(20, 30)]
    assert run(scheduler, turn) == [(8, 8), (16, 4)]
    assert run(scheduler, turn) == [(16, 4)]


def test_a_chunk_that_the_step_ends_before_the_cut_goes_on_to_it() -> None:
    scheduler = make_caching(max_num_batched_tokens=6, num_slots=1)
    assert run(scheduler, range(2, 21)) == [(0, 6), (6, 6), (12, 4), (16, 3)]


def test_the_second_of_a_kind_saves_where_it_parts_and_the_third_starts_there() -> None:
    scheduler = make_caching()
    shared = list(range(2, 12))  # two pages and a half
    assert run(scheduler, [*shared, *range(20, 28)]) == [(0, 16), (16, 2)]
    assert run(scheduler, [*shared, *range(30, 38)]) == [(0, 8), (8, 8), (16, 2)]
    assert run(scheduler, [*shared, *range(40, 48)]) == [(8, 8), (16, 2)]


def test_a_scored_prompt_is_neither_cut_nor_kept_nor_started_behind_a_prefix() -> None:
    scheduler = make_caching()
    prompt = range(2, 12)
    assert run(scheduler, prompt, prompt_logprobs=0) == [(0, 10)]
    assert run(scheduler, prompt) == [(0, 8), (8, 2)]
    assert run(scheduler, prompt, prompt_logprobs=0) == [(0, 10)]


def test_what_was_skipped_is_counted_by_prompt_and_output() -> None:
    sequence = make_sequence([5, 6, 5, 7, 8])
    sequence.output += [6, 6, 9, 4]
    sequence.admit(0, num_cached=8)
    output, prompt = sequence.skipped_counts(vocab_size=12)
    np.testing.assert_array_equal(output, np.bincount([6, 6, 9], minlength=12))
    np.testing.assert_array_equal(np.flatnonzero(prompt), [5, 6, 7, 8])
    assert (output.dtype, prompt.dtype) == (np.int32, bool)


def test_rings_are_restored_before_the_first_row_and_saved_behind_the_cut() -> None:
    scheduler = make_caching(num_slots=2)
    first, second = make_sequence(range(2, 12), "a"), make_sequence(range(2, 12), "b")
    scheduler.add(first)
    schedule, saves, _ = dispatch(scheduler)
    assert schedule.restores == []
    assert saves == [SnapshotMove(first, 0)]
    scheduler.add(second)
    schedule, saves, _ = dispatch(scheduler)
    assert schedule.restores == [SnapshotMove(second, 0)]
    assert saves == []
    assert [(r.row.start, r.num_tokens) for r in schedule.rows] == [(8, 2), (8, 2)]


def test_a_page_is_found_only_after_the_step_that_fills_it_was_dispatched() -> None:
    scheduler = make_caching()
    same = [make_sequence(range(2, 12), name) for name in "abc"]
    # Two are admitted beside each other and feed the same; the step has room for a part of the third.
    assert chunks(scheduler, *same) == [[(0, 8), (0, 8), (0, 8)], [(8, 2), (8, 2), (8, 2)]]
    # What they filled thrice they hold once, and only one copy of the rings was kept.
    assert len({tuple(s.pages[:2]) for s in same}) == 1
    assert len({page for s in same for page in s.pages}) == 2 + 3
    assert scheduler.pages.num_free == 64 - 5
    table = scheduler.page_table.snapshot()
    for sequence in same:
        np.testing.assert_array_equal(table[sequence.slot, :3], sequence.pages[:3])


def test_no_step_writes_to_a_page_that_others_may_read() -> None:
    """The table of a step names the request's own page wherever the step writes, drafts past the end included."""
    scheduler = make_caching(draft_cap=3, min_depth=3, max_num_batched_tokens=64)
    same = [make_sequence(range(2, 14), name, max_tokens=20) for name in "abcd"]
    for sequence in same:
        scheduler.add(sequence)
    for _ in range(8):
        shared_before = set(scheduler.pages._by_page)
        schedule, _, table = dispatch(scheduler)
        for scheduled in schedule.rows:
            row = scheduled.row
            if row.prompt_ids is not None:
                start, end = row.start, row.start + scheduled.num_tokens
            else:
                start, end = len(scheduled.sequence.prompt), scheduled.sequence.max_len
            written = set(table[row.slot, start // SIZE : -(-end // SIZE)].tolist())
            assert not written & shared_before
            others = np.delete(table, row.slot, axis=0)
            assert not written & set(others[others >= 0].tolist())
        land(schedule, *([9] if r.row.samples else [] for r in schedule.rows))


def test_a_preempted_request_starts_behind_what_it_had_fed() -> None:
    scheduler = make_caching(num_pages=9, num_slots=2)
    old = make_sequence(range(2, 14), "old", max_tokens=24)
    young = make_sequence(range(30, 42), "young", max_tokens=24)
    scheduler.add(old)
    scheduler.add(young)
    starts: list[int] = []
    while len(young.output) < 10:
        schedule, _, _ = dispatch(scheduler)
        starts += [r.row.start for r in schedule.rows if r.row.prompt_ids is not None]
        land(schedule, *([9] if r.row.samples else [] for r in schedule.rows))
        if young.slot < 0 and old.slot >= 0:
            scheduler.finish(old)
    # Both prompts in two chunks; then the young one again, which had saved its rings behind eight tokens.
    assert starts[:5] == [0, 0, 8, 8, 8]


def test_a_hit_never_takes_more_pages_than_feeding_the_prompt_would() -> None:
    scheduler = make_caching(num_pages=4, num_slots=2)
    prompt = range(2, 12)
    run(scheduler, prompt, max_tokens=2)
    assert run(scheduler, prompt, max_tokens=2) == [(8, 2)]
    holder = make_sequence(prompt, "holder", max_tokens=4)
    scheduler.add(holder)
    schedule, _, _ = dispatch(scheduler)
    assert schedule.restores
    land(schedule, [9])
    assert len(holder.pages) + scheduler.pages.num_free == 4


def test_prefixes_that_were_forgotten_are_fed_again() -> None:
    scheduler = make_caching()
    run(scheduler, range(2, 12))
    scheduler.forget_prefixes()
    assert run(scheduler, range(2, 12)) == [(0, 8), (8, 2)]
    assert run(scheduler, range(2, 12)) == [(8, 2)]
