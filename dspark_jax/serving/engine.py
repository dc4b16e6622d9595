"""The engine: one thread that plans steps, keeps two of them in flight and streams what they produce."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import numpy as np

from dspark_jax.budget import NO_PROPOSAL
from dspark_jax.config import ModelConfig
from dspark_jax.decode.plan import StepOutputs, StepPlan
from dspark_jax.serving.buckets import bucket_for
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.executor_protocol import Executor
from dspark_jax.serving.intake import Intake
from dspark_jax.serving.metrics import Metrics
from dspark_jax.serving.policy import VerificationPolicy, policy_from_config
from dspark_jax.serving.prefix_cache import PrefixCache
from dspark_jax.serving.request import FinishReason, Request, TokenChunk
from dspark_jax.serving.scheduler import Schedule, Scheduler
from dspark_jax.serving.sequence import Sequence, Status
from dspark_jax.serving.step import Landing, StepInFlight, land, mark_dispatched, report_step
from dspark_jax.serving.streams import Mailbox, Stream

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
MAX_OPEN_REQUESTS = 4096


class Engine:
    """Implements `EngineClient` over an `Executor`.

    Clients call `generate` on an event loop; everything else happens on the engine's own thread. The loop never
    waits for the step it has just dispatched: while the device runs step t, the host hands out the tokens of
    step t - 1 and plans step t + 1.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        model_config: ModelConfig,
        metrics: Metrics,
        build_policy: Callable[[Executor], VerificationPolicy],
        seed: int = 0,
        max_open_requests: int = MAX_OPEN_REQUESTS,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            executor: runs the steps; its last bucket is the most tokens of a step.
            model_config: of the model it runs.
            metrics: receives load, steps and pre-emptions.
            build_policy: makes the verification policy once the executor is warm.
            seed: seed from which requests without one draw theirs.
            max_open_requests: running and waiting requests; one more is refused.
            on_failure: called on the engine's thread after the step loop has failed and every client knows.
        """
        self._executor = executor
        self._model_config = model_config
        self._metrics = metrics
        self._build_policy = build_policy
        self._seed = seed
        self._random = random.Random(seed)
        self._intake = Intake(max_open_requests)
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

        self._policy: VerificationPolicy
        self._buckets: tuple[int, ...]
        self._scheduler: Scheduler
        self._streams: dict[Sequence, Stream] = {}
        self._mailbox = Mailbox()
        self._in_flight: deque[StepInFlight] = deque()
        self._num_steps = 0
        self._last_landed_at = 0.0
        self._last_cpu_s = 0.0
        self._was_awaited = False
        self._unread: set[Stream] = set()
        # Confidences of each slot's newest landed proposal, to compare with what was accepted of it.
        self._confidences = np.ones((executor.num_slots, executor.draft_len), np.float32)

    @classmethod
    def from_config(
        cls,
        config: ServeConfig,
        metrics: Metrics,
        *,
        on_failure: Callable[[], None] | None = None,
    ) -> Engine:
        """An engine on this process's devices, with the weights loaded. `start` compiles and measures."""
        # Only here, so that planning, its tests and `--help` don't load JAX.
        from dspark_jax.serving.executor import Executor as DeviceExecutor

        executor = DeviceExecutor.from_config(config)
        return cls(
            executor,
            model_config=executor.model_config,
            metrics=metrics,
            build_policy=lambda warm: policy_from_config(
                config.speculative_config,
                num_slots=warm.num_slots,
                draft_len=warm.draft_len,
                cost=warm.cost_table,
            ),
            seed=config.seed,
            on_failure=on_failure,
        )

    @property
    def model_config(self) -> ModelConfig:
        return self._model_config

    @property
    def executor(self) -> Executor:
        """Whatever runs the steps."""
        return self._executor

    @property
    def max_model_len(self) -> int:
        return self._executor.max_model_len

    @property
    def is_healthy(self) -> bool:
        return self._intake.failure is None

    @property
    def is_draining(self) -> bool:
        return self._intake.is_draining

    @property
    def failure(self) -> str | None:
        """Why the step loop failed, None while it is healthy."""
        return self._intake.failure

    def start(self) -> None:
        """Compile, measure, and start the step loop. Blocks until requests can be served.

        Raises ValueError if the executor's buckets, pages or logits can't hold one request.
        """
        if self._thread is not None:
            raise RuntimeError("the engine has been started already")
        self._executor.warm_up()
        self._use(self._build_policy(self._executor), self._executor.buckets)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._intake.start()

    def change_policy(
        self, policy: VerificationPolicy, buckets: tuple[int, ...] | None = None
    ) -> None:
        """Let another policy size the steps from now on; for benchmarks.

        Requests without a seed draw the same ones after every change, and no prefix is cached any more.

        Args:
            policy: a new one.
            buckets: those of the executor's buckets that steps may run in, with its last; all if None.

        Raises `EngineUnavailable` while requests are open, and ValueError for other buckets.
        """
        compiled = self._executor.buckets
        buckets = compiled if buckets is None else buckets
        if not set(buckets) <= set(compiled) or buckets[-1:] != compiled[-1:]:
            raise ValueError(
                f"buckets {list(buckets)} are not some of {list(compiled)}, the last included"
            )
        with self._intake.asleep():
            self._random.seed(self._seed)
            self._use(policy, buckets)

    def _use(self, policy: VerificationPolicy, buckets: tuple[int, ...]) -> None:
        executor = self._executor
        self._policy, self._buckets = policy, buckets
        self._scheduler = Scheduler(
            num_slots=executor.num_slots,
            max_num_batched_tokens=buckets[-1],
            max_logit_rows=executor.max_logit_rows(buckets[-1]),
            max_model_len=executor.max_model_len,
            draft_cap=policy.draft_cap,
            min_depth=policy.min_depth,
            pages=PrefixCache(executor.num_pages, executor.page_size, executor.num_snapshots),
            on_admit=self._on_admit,
            on_preempt=lambda s: self._metrics.on_preemption(),
        )

    def _on_admit(self, sequence: Sequence) -> None:
        self._policy.on_admit(sequence.slot, first_serial=self._num_steps)
        if self._executor.num_snapshots and sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_fed
            if not sequence.wants_prompt_logprobs:
                self._metrics.on_prefix_lookup(len(sequence.prompt), num_hits=sequence.num_fed)

    def shutdown(self, drain: bool = True) -> None:
        """Refuse new requests, let running ones finish (or, without `drain`, abort them), and stop the thread.

        Blocks until then. A second call without `drain` cuts a drain short.
        """
        self._intake.drain(abort=not drain)
        if self._thread is not None:
            self._thread.join()

    async def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Stream the chunks of `request`; closing the iterator early aborts the request.

        Raises ValueError for a request that can't run and `EngineUnavailable` for one that can't run now.
        """
        self._intake.check()
        sequence = self._make_sequence(request)
        stream = self._intake.open(sequence)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            self._intake.close(sequence)

    def _make_sequence(self, request: Request) -> Sequence:
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            max_model_len=self.max_model_len,
            eos_token_id=self._model_config.eos_token_id,
            seed=self._random.getrandbits(64) if seed is None else seed % 2**64,
        )
        self._scheduler.check(sequence)
        return sequence

    def _run(self) -> None:
        try:
            while self._has_work():
                self._step()
        except BaseException as error:  # whatever it is, the clients must learn of it
            self._fail(error)

    def _has_work(self) -> bool:
        """True at once, or as soon as there is something to do; False when there never will be again."""
        if self._in_flight or self._scheduler.has_work:
            return True
        self._deliver()
        return self._intake.wait()

    def _step(self) -> None:
        """One turn: dispatch the next step, then wait for the one before it."""
        started = time.perf_counter()
        self._take_requests()
        schedule = self._scheduler.schedule()
        if schedule.rows:
            self._in_flight.append(self._dispatch(schedule, started))
        # Only now, before a wait: from here on the clients' threads compete for the interpreter.
        self._deliver()
        if len(self._in_flight) == MAX_IN_FLIGHT or (self._in_flight and not schedule.rows):
            self._land(self._in_flight.popleft())
        elif self._scheduler.has_work and not self._in_flight:
            raise RuntimeError("requests wait, nothing runs, and none of them can be scheduled")
        self._metrics.set_load(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            cache_usage=self._scheduler.pages.usage,
        )

    def _take_requests(self) -> None:
        arrivals, closings = self._intake.take()
        for sequence, stream in arrivals:
            self._streams[sequence] = stream
            self._scheduler.add(sequence)
        for sequence in closings:
            self._drop(sequence)
        if self._intake.is_aborting:
            for sequence, stream in list(self._streams.items()):
                self._mailbox.post(stream, TokenChunk((), finish_reason=FinishReason.ABORT))
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence; steps in flight may still have rows of it, which will be ignored."""
        if self._streams.pop(sequence, None) is not None:
            self._scheduler.finish(sequence)

    def _dispatch(self, schedule: Schedule, started: float) -> StepInFlight:
        size = self._policy.size(schedule)
        bucket = bucket_for(self._buckets, schedule.num_tokens + size.budget)
        plan = StepPlan(
            rows=tuple(scheduled.row for scheduled in schedule.rows),
            page_table=self._scheduler.page_table.snapshot(),
            budget=size.budget,
            bucket=bucket,
            drafts=size.drafts,
            min_depth=size.min_depth,
        )
        if not self._was_awaited:
            # The device is ahead of the host: no wait will come, but a launch leaves the interpreter alone too.
            self._unread |= self._mailbox.deliver()
        planned = time.perf_counter()
        for sequence, place in schedule.restores:
            self._restore(sequence, place)
        pending = self._executor.dispatch(plan)
        for sequence, place in self._scheduler.on_dispatch(schedule):
            self._executor.save_snapshot(sequence.slot, place)
        launch_s = time.perf_counter() - planned
        number = self._num_steps
        self._num_steps += 1
        mark_dispatched(schedule, size, number)
        now = time.perf_counter()
        return StepInFlight(
            number=number,
            schedule=schedule,
            size=size,
            bucket=bucket,
            slots=np.array([row.slot for row in plan.rows]),
            pending=pending,
            dispatched_at=now,
            planning_s=now - started,
            launch_s=launch_s,
        )

    def _restore(self, sequence: Sequence, place: int) -> None:
        self._executor.restore_snapshot(sequence.slot, place)
        if sequence.request.sampling.has_penalty:
            counts = sequence.skipped_counts(self._model_config.vocab_size)
            self._executor.set_counts(sequence.slot, *counts)

    def _land(self, step: StepInFlight) -> None:
        is_awaited = not step.pending.is_ready()
        outputs = step.pending.fetch()
        landed_at = time.perf_counter()
        step_ms = 1e3 * (landed_at - max(step.dispatched_at, self._last_landed_at))
        # A step that had landed before it was waited for has no known end.
        if is_awaited and (self._was_awaited or step.dispatched_at > self._last_landed_at):
            self._policy.on_step_time(step.schedule, step.size, step_ms)
        self._was_awaited, self._last_landed_at = is_awaited, landed_at

        landing = land(step, outputs)
        if landing.num_non_finite:
            self._scheduler.forget_prefixes()  # some of them may be what made it so
        for sequence, chunk in landing.chunks:
            self._mailbox.post(self._streams[sequence], chunk)
            if chunk.finish_reason is not None:
                self._drop(sequence)
        self._report(step, outputs, landing, step_ms, landed_at)

    def _deliver(self) -> None:
        """Hand out the chunks; requests whose event loop has been closed are dropped."""
        unread, self._unread = self._unread | self._mailbox.deliver(), set()
        if unread:
            for sequence in [s for s, stream in self._streams.items() if stream in unread]:
                self._drop(sequence)
            for stream in unread:
                self._intake.forget(stream.request_id)

    def _report(
        self,
        step: StepInFlight,
        outputs: StepOutputs,
        landing: Landing,
        step_ms: float,
        landed_at: float,
    ) -> None:
        """Let the policy and the metrics learn from a step."""
        confidences = self._confidences[step.slots[landing.verified_rows]]
        self._policy.on_verdicts(step.schedule, step.size, landing.admitted, landing.accepted)
        if step.size.drafts:
            serials = step.serials(outputs)
            self._policy.on_landing(step.slots, serials, outputs.confidences)
            is_new = serials != NO_PROPOSAL
            self._confidences[step.slots[is_new]] = outputs.confidences[is_new]
        cpu_s = time.thread_time()
        host_cpu_s, self._last_cpu_s = cpu_s - self._last_cpu_s, cpu_s
        self._metrics.on_step(
            report_step(
                step,
                landing,
                confidences,
                step_ms=step_ms,
                host_s=step.planning_s + time.perf_counter() - landed_at,
                host_cpu_s=host_cpu_s,
                is_drafter_skipped=self._policy.draft_cap > 0 and not step.size.drafts,
            )
        )

    def _fail(self, error: BaseException) -> None:
        """End every request with the reason. The device state is unknown now, so nothing can go on."""
        logger.error("the engine's step loop failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self._streams.update(self._intake.fail(reason))
        chunk = TokenChunk((), finish_reason=FinishReason.ERROR, error=reason)
        for sequence, stream in self._streams.items():
            # Past the scheduler, whose state may be what has failed.
            sequence.leave(Status.FINISHED)
            self._mailbox.post(stream, chunk)
        self._mailbox.deliver()
        self._streams.clear()
        self._in_flight.clear()
        if self._on_failure is not None:
            self._on_failure()
