"""Steps for nobody: run at start to measure what a step takes, and so that no client waits for a first run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.decode.effort import Effort
from dspark_jax.decode.plan import RowPlan, StepPlan
from dspark_jax.serving.buckets import bucket_for

if TYPE_CHECKING:
    from dspark_jax.serving.executor import Executor

_FIRST_RUN_CONTEXT = 16


def run_every_program(
    executor: Executor,
    row_buckets: tuple[int, ...],
    efforts: tuple[Effort, ...],
    *,
    progress: bool,
) -> None:
    """Run each program once; leaves the executor with empty slots.

    The first run of a program takes far longer than the next: its code and its buffers are not in memory yet.

    Args:
        executor: with all its programs compiled.
        row_buckets: request counts of the drafting half; empty without a drafter.
        efforts: those that there are programs for.
        progress: show a bar.
    """
    context_len = min(_FIRST_RUN_CONTEXT, max(executor.max_model_len - 16, 1))
    with tqdm(
        total=(len(executor.buckets) + len(row_buckets)) * len(efforts),
        unit="program",
        desc="first runs",
        disable=not progress,
    ) as bar:
        for effort in efforts:
            for bucket in executor.buckets:
                pretend(executor, context_len)
                num_rows = min(-(-bucket // (executor.draft_len + 1)), executor.num_slots)
                executor.dispatch(dummy_plan(executor, bucket, num_rows, effort))
                bar.update()
            for rows in row_buckets:
                pretend(executor, context_len)
                executor.dispatch_draft(dummy_plan(executor, rows, rows, effort))
                bar.update()
        if executor.num_snapshots:
            executor.save_snapshot(slot=0, place=0)
            executor.restore_snapshot(slot=0, place=0)
            vocab = executor.model_config.vocab_size
            executor.set_counts(0, np.zeros(vocab, np.int32), np.zeros(vocab, bool))
        jax.block_until_ready(executor.state)
    executor.state = executor.fresh_state()


def pretend(executor: Executor, context_len: int) -> None:
    """Make every slot look like a request with `context_len` cached tokens and, if drafted for, a full draft.

    Token ids differ, so that routing spreads over the experts as real text does.
    """
    state = executor.state
    slots, vocab = executor.num_slots, executor.model_config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab, (slots, executor.draft_len + 1))
    proposals = state.proposals
    if proposals is not None:
        proposals = proposals.replace(
            lens=jnp.full(slots, executor.draft_len, jnp.int32),
            tokens=jnp.asarray(ids[:, 1:], jnp.int32),
            confidences=jnp.ones((slots, executor.draft_len), jnp.float32),
        )
    executor.state = state.replace(
        positions=jnp.full(slots, context_len, jnp.int32),
        anchors=jnp.asarray(ids[:, 0], jnp.int32),
        ended=jnp.zeros(slots, bool),
        proposals=proposals,
    )


def dummy_plan(
    executor: Executor, num_tokens: int, num_requests: int, effort: Effort = Effort.PLAIN
) -> StepPlan:
    """`num_tokens` tokens: decoding rows with their drafts, then a prompt chunk if that is not enough.

    The slots must look as `pretend` makes them. The rows ask for `effort`.
    """
    rows = [
        RowPlan(
            slot=slot,
            draft_cap=executor.draft_len,
            limit=executor.max_model_len,
            prompt_len=1,
            temperature=1.0,
            wants_logprobs=effort is Effort.FULL,
        )
        for slot in range(num_requests)
    ]
    budget = min(num_tokens - len(rows), executor.draft_len * len(rows))
    rest = num_tokens - len(rows) - budget
    if rest:
        # The last row brings what is left as a chunk of its prompt.
        chunk = min(rest + 1 + executor.draft_len, executor.max_model_len - 1)
        budget = max(budget - executor.draft_len, 0)
        rows[-1] = RowPlan(
            slot=len(rows) - 1,
            prompt_ids=np.arange(chunk, dtype=np.int32) % executor.model_config.vocab_size,
            limit=executor.max_model_len,
            prompt_len=chunk,
        )
    # Pages of different slots overlap: only the time is wanted.
    pages = np.arange(executor.num_slots * executor.max_pages) % executor.num_pages
    return StepPlan(
        rows=tuple(rows),
        page_table=pages.reshape(executor.num_slots, executor.max_pages).astype(np.int32),
        budget=budget,
        bucket=bucket_for(executor.buckets, num_tokens),
        drafts=False,
    )
