"""Nothing on the way to a dispatch waits for the device: results that are read too early are an error here."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.budget import BudgetPolicy, CostCurves, CostTable
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.packing import PackedPlan, PackedRows, unpack_rows
from dspark_jax.decode.plan import RowFinish
from dspark_jax.decode.settle import DeviceOutputs
from dspark_jax.decode.state import DecodeState
from dspark_jax.decode.step import ModelParams
from dspark_jax.model.cache import PageGeometry
from dspark_jax.serving.executables import StepLeaves
from dspark_jax.serving.executor import Executor
from dspark_jax.serving.policy import AdaptiveVerification
from tests.checkpoint.tiny import tiny_config
from tests.serving.engine.harness import collect, make_request, serving

NUM_SLOTS = 4
TOKEN = 5
CFG = tiny_config()
assert CFG.draft is not None
DRAFT_LEN = CFG.draft.block_size


class TooEarly(Exception):
    """A result was read before the step after it had been dispatched."""


class Result:
    """An array of step `number` that the host may read only when the next step is on its way, or none will be."""

    def __init__(self, programs: Programs, number: int, value: np.ndarray) -> None:
        self._programs, self._number, self._value = programs, number, value
        self.is_copied = False

    def copy_to_host_async(self) -> None:
        self.is_copied = True

    def is_ready(self) -> bool:
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_copied:
            raise TooEarly("the copy has not even been started")
        if self._programs.num_steps <= self._number + 1 and not self._programs.has_ended:
            raise TooEarly(
                f"step {self._number} is read, {self._programs.num_steps} are dispatched"
            )
        self._programs.num_read += 1
        return self._value


class Programs:
    """In place of the compiled ones: every row draws `TOKEN` and accepts nothing."""

    draft_len = DRAFT_LEN
    num_snapshots = 0
    row_buckets = (NUM_SLOTS,)
    efforts = (Effort.AS_NEEDED,)

    def __init__(self) -> None:
        self.num_steps = self.num_read = 0
        self.lengths = np.zeros(NUM_SLOTS, int)
        self.limits = np.zeros(NUM_SLOTS, int)

    @property
    def has_ended(self) -> bool:
        """True when what is dispatched ends every request."""
        return bool((self.lengths >= self.limits).all())

    def rows(self, bucket: int) -> int:
        return NUM_SLOTS

    def logit_rows(self, bucket: int) -> int:
        return bucket

    def compile(self, params: Any, state: Any, *, progress: bool) -> None:
        pass

    def verify(
        self, leaves: StepLeaves, state: DecodeState, plan: PackedPlan, effort: Effort
    ) -> tuple[DecodeState, DeviceOutputs]:
        rows = unpack_rows(plan.rows)
        num_rows = len(plan.rows.ints)
        ints = np.zeros((num_rows, DRAFT_LEN + 4), np.int32)
        self.limits[:] = 0  # of slots without a row, which wait for nothing
        for i, slot in enumerate(np.asarray(rows.slot).tolist()):
            if slot < 0:
                continue
            self.limits[slot] = rows.limit[i]
            if rows.num_prompt[i]:
                self.lengths[slot] = rows.start[i] + rows.num_prompt[i]
            if rows.samples[i] and self.lengths[slot] < self.limits[slot]:
                self.lengths[slot] += 1
                is_last = self.lengths[slot] == self.limits[slot]
                ints[i, 0] = TOKEN
                ints[i, -3] = 1
                ints[i, -2] = RowFinish.LENGTH if is_last else RowFinish.RUNNING
        outputs: Any = DeviceOutputs(
            ints=Result(self, self.num_steps, ints),
            logprobs=None,
            prompt_logprobs=None,
        )
        self.num_steps += 1
        return state, outputs

    def draft(
        self, leaves: StepLeaves, state: DecodeState, rows: PackedRows, effort: Effort
    ) -> tuple[DecodeState, Any]:
        confidences = np.full((len(rows.ints), DRAFT_LEN), 0.8, np.float32)
        return state, Result(self, self.num_steps - 1, confidences)


async def test_no_step_waits_for_the_one_before_it() -> None:
    """From schedule to dispatch, with the executor that serves and a policy that needs confidences."""
    curves = CostCurves(context_len=16, verify={8: 1.0, 32: 1.5}, draft={NUM_SLOTS: 0.0})
    policy = AdaptiveVerification(
        num_slots=NUM_SLOTS,
        draft_len=DRAFT_LEN,
        cost=CostTable([curves], max_tokens=32, max_requests=NUM_SLOTS),
        objective=BudgetPolicy(),
        skipper=None,
    )
    programs: Any = Programs()
    nothing: Any = None
    executor = Executor(
        CFG,
        ModelParams(target=nothing, draft=None),
        num_slots=NUM_SLOTS,
        geometry=PageGeometry(256, NUM_SLOTS, 1),
        max_model_len=64,
        executables=programs,
        buckets=(8, 16, 32),
        cache_dtype=jnp.float32,
        profile=None,
    )
    async with serving(executor, policy) as engine:
        outcome = await collect(engine, make_request(max_tokens=24, ignore_eos=True))
        assert engine.failure is None
    assert outcome.tokens == [TOKEN] * 24
    assert programs.num_steps >= 24
    assert programs.num_read > 24
