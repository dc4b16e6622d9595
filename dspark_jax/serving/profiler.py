"""Step times at start: run dummy steps of every shape at a synthetic context and build the cost table."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from tqdm import tqdm

import dspark_jax
from dspark_jax.budget import (
    CostCurves,
    CostTable,
    LiveCorrection,
    ProfileSample,
    ProfileShape,
    curves_from_samples,
    load_profile,
    profile_plan,
    resolve_context_len,
    save_profile,
)
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.dummy_step import dummy_plan, pretend

if TYPE_CHECKING:
    from dspark_jax.serving.executor import Executor

logger = logging.getLogger(__name__)

# The second context point, from which costs at other contexts are interpolated.
_SHORT_CONTEXT_DIVISOR = 8


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What is measured and where it is kept."""

    context_lens: tuple[int, ...]
    capture_limit: int
    correct_live: bool
    cache_file: Path | None
    flags: dict[str, object]

    @classmethod
    def from_config(
        cls,
        config: ServeConfig,
        cache_dir: Path,
        *,
        max_model_len: int,
        num_slots: int,
        buckets: tuple[int, ...],
    ) -> ProfileSettings:
        """Settings for a server's flags; the cache file is named after everything that times depend on."""
        context = resolve_context_len(config.profile_context_len, os.environ, max_model_len)
        # Room for the draft that a profiled step appends.
        context = max(min(context, max_model_len - 16), 1)
        short = max(context // _SHORT_CONTEXT_DIVISOR, 1)
        assert config.speculative_config is not None
        flags = {
            "model": str(config.model_folder.resolve()),
            "max_num_seqs": num_slots,
            "max_model_len": max_model_len,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "buckets": list(buckets),
            "context_lens": sorted({short, context}),
        }
        name = hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]
        return cls(
            context_lens=tuple(sorted({short, context})),
            capture_limit=buckets[-1],
            correct_live=config.speculative_config.enable_live_correction,
            cache_file=None if config.no_profile_cache else cache_dir / "profiles" / f"{name}.json",
            flags=flags,
        )


def build_cost_table(executor: Executor, settings: ProfileSettings) -> CostTable:
    """Load the stored profile or measure one; leaves the executor with empty slots.

    All buckets are compiled, so every token count pads to one: the whole table is a staircase.
    """
    key = _key(executor, settings)
    curves = load_profile(settings.cache_file, key) if settings.cache_file else None
    if curves is None:
        curves = _measure(executor, settings)
        if settings.cache_file is not None:
            save_profile(settings.cache_file, curves, key)
    return CostTable(
        curves,
        max_tokens=executor.buckets[-1],
        max_requests=executor.num_slots,
        correction=LiveCorrection(executor.buckets, executor.buckets[-1])
        if settings.correct_live
        else None,
    )


def _measure(executor: Executor, settings: ProfileSettings) -> tuple[CostCurves, ...]:
    shapes = profile_plan(
        executor.buckets,
        max_tokens=executor.buckets[-1],
        max_requests=executor.num_slots,
        draft_len=executor.draft_len,
    )
    curves = []
    total = sum(shape.num_runs for shape in shapes) * len(settings.context_lens)
    with tqdm(total=total, unit="step", desc="profiling") as bar:
        for context_len in settings.context_lens:
            samples = []
            # Shape after shape and then again, so that a burst of other load on the host does not hit all runs
            # of one shape: that would make it look dearer than a larger one.
            for run in range(max(shape.num_runs for shape in shapes)):
                for shape in shapes:
                    if run < shape.num_runs:
                        samples.append(_sample(executor, shape, context_len))
                        bar.update()
            curves.append(curves_from_samples(samples, context_len))
    executor.state = executor.fresh_state()
    return tuple(curves)


def _sample(executor: Executor, shape: ProfileShape, context_len: int) -> ProfileSample:
    """Time one verification of `shape.num_tokens` tokens, and the drafter on the same rows."""
    plan = dummy_plan(executor, shape.num_tokens, shape.num_requests)

    def prepare() -> None:
        pretend(executor, context_len)

    return ProfileSample(
        num_tokens=shape.num_tokens,
        num_requests=shape.num_requests,
        verify_ms=_time_ms(prepare, lambda: executor.dispatch(plan).ints),
        draft_ms=_time_ms(prepare, lambda: executor.dispatch_draft(plan)),
        is_captured=shape.is_captured,
    )


def _time_ms(prepare: Callable[[], None], launch: Callable[[], Any]) -> float:
    """What a step costs in a row of its like, as in serving: the second of two runs, launched behind the first.

    The first brings weights into the caches of a CPU, where the shape timed before has left others, and covers the
    launch of the second. A step takes no less than its launch, which the next one waits for.
    """
    prepare()
    first = launch()
    prepare()  # no part of a step, so no part of its time
    started = time.perf_counter()
    second = launch()
    launched = time.perf_counter()
    jax.block_until_ready(first)
    ended_first = time.perf_counter()
    jax.block_until_ready(second)
    return 1e3 * max(time.perf_counter() - ended_first, launched - started)


def _key(executor: Executor, settings: ProfileSettings) -> dict[str, object]:
    """Everything that a step's time depends on."""
    device = jax.devices()[0]
    return {
        **settings.flags,
        "model_shape": hashlib.sha256(
            json.dumps(asdict(executor.model_config), default=str, sort_keys=True).encode()
        ).hexdigest(),
        "device": device.device_kind,
        "cores": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "dspark_jax": dspark_jax.__version__,
    }
