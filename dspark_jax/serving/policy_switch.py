"""Changing the verification policy of a running server, so that one start-up serves all arms of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dspark_jax.budget import LiveCorrection
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.executor_protocol import Executor
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.policy import policy_from_config
from dspark_jax.serving.speculative_config import SpeculativeConfig

# What is compiled into the programs, or drawn from them, stays as the server was started.
_FIXED = (
    "num_speculative_tokens draft_sample_method rejection_sample_method synthetic_acceptance_rates"
).split()


class PolicySwitch:
    """Puts other policies into an engine whose programs were compiled for drafting."""

    def __init__(self, engine: Engine, executor: Executor, config: ServeConfig) -> None:
        self._engine, self._executor, self._config = engine, executor, config

    def change(
        self, speculative: SpeculativeConfig | None, max_capture_tokens: int | None
    ) -> dict[str, Any]:
        """Serve as if started with this `--speculative-config` and `--max-capture-tokens`.

        The programs stay, so without speculation too the drafter's context is written. The policy is new and has
        learned nothing.

        Returns what is in force, for the client's record.

        Raises `FlagError` for what the programs of this server cannot do, and `EngineUnavailable` while requests
        run.
        """
        started = self._config.speculative_config
        if speculative is not None:
            if started is None:
                raise FlagError("this server was started without a drafter")
            same = {name: getattr(speculative, name) for name in _FIXED}
            if replace(started, **same) != started:
                raise FlagError(f"{', '.join(_FIXED)} cannot change while the server runs")
        executor = self._executor
        buckets = executor.buckets
        if max_capture_tokens is not None:
            buckets = _captured(buckets, max_capture_tokens)
        cost = executor.cost_table
        if speculative is not None and cost is not None:
            corrects = speculative.enable_live_correction
            correction = LiveCorrection(buckets, buckets[-1]) if corrects else None
            cost = cost.padded_to(buckets, correction)
        try:
            policy = policy_from_config(
                speculative,
                num_slots=executor.num_slots,
                draft_len=executor.draft_len,
                cost=cost,
            )
            self._engine.change_policy(policy, buckets)
        except ValueError as error:
            raise FlagError(str(error)) from error
        mode = "none" if speculative is None else speculative.mode
        return {"mode": mode, "draft_cap": policy.draft_cap, "buckets": list(buckets)}


def _captured(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """Of compiled buckets those up to `most`, above it only such as double the one before, and the last.

    Raises `FlagError` when none is that small.
    """
    kept = [bucket for bucket in buckets if bucket <= most]
    if not kept:
        raise FlagError(
            f"no compiled step size holds at most {most} tokens; the smallest is {buckets[0]}"
        )
    for bucket in buckets[len(kept) :]:
        if bucket >= 2 * kept[-1] or bucket == buckets[-1]:
            kept.append(bucket)
    return tuple(kept)
