"""Measuring a cost table: which shapes to run, what to keep of the runs, and where to store it.

The plan and the statistics follow vLLM's adaptive verification (vllm-project/vllm#47808). Running
the shapes is the executor's part; everything here is plain host arithmetic.
"""

import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.budget.cost_table import SWITCH_OFF, CostCurves

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_LEN = 8192
CONTEXT_LEN_VARIABLES = (
    "DSPARK_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
)
RUNS_PER_SHAPE = 5
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ProfileShape:
    """One dummy step to time: `num_runs` executions, each a `ProfileSample`."""

    num_tokens: int
    num_requests: int
    is_captured: bool
    num_runs: int = RUNS_PER_SHAPE


@dataclass(frozen=True, kw_only=True)
class ProfileSample:
    """Times of one execution.

    `is_captured` says that it ran a compiled shape, so that the drafter was timed without gaps
    caused by the host.
    """

    num_tokens: int
    num_requests: int
    verify_ms: float
    draft_ms: float
    is_captured: bool


def profile_plan(
    captured_tokens: Iterable[int],
    *,
    max_tokens: int,
    max_requests: int,
    draft_len: int,
    num_runs: int = RUNS_PER_SHAPE,
) -> tuple[ProfileShape, ...]:
    """Shapes to time at start: every captured token count, then a tail up to `max_tokens`.

    With G the largest captured count the tail is G + G // 2 and G doubled until `max_tokens` is
    reached, each clamped to `max_tokens`. A dummy step packs its tokens into as few decoding
    requests as hold them, `draft_len` + 1 each, and at most `max_requests`.

    Raises:
        ValueError: nothing is captured, or a captured count is outside 1..max_tokens.
    """
    captured = sorted(set(captured_tokens))
    if not captured:
        raise ValueError(f"no compiled token bucket to profile: {SWITCH_OFF}")
    if captured[0] < 1 or captured[-1] > max_tokens:
        raise ValueError(f"captured counts must lie in 1..{max_tokens}, got {captured}")
    limit = captured[-1]
    tail = {min(limit + limit // 2, max_tokens)}
    doubled = limit
    while doubled < max_tokens:
        doubled = min(2 * doubled, max_tokens)
        tail.add(doubled)

    def shape(num_tokens: int, is_captured: bool) -> ProfileShape:
        return ProfileShape(
            num_tokens=num_tokens,
            num_requests=min(-(-num_tokens // (draft_len + 1)), max_requests),
            is_captured=is_captured,
            num_runs=num_runs,
        )

    return tuple(
        [shape(count, True) for count in captured]
        + [shape(count, False) for count in sorted(tail - set(captured))]
    )


def curves_from_samples(samples: Iterable[ProfileSample], context_len: int) -> CostCurves:
    """Medians of the samples taken at one context length.

    The median, because the first of several runs is routinely twice the others. The draft curve
    uses captured samples only: request counts, unlike token counts, collide across ways of
    execution, and one slow uncaptured sample would spoil a small entry and, through the running
    maximum, every larger one.

    Raises:
        ValueError: a time is negative or not finite, or one of the curves is empty.
    """
    verify: dict[int, list[float]] = defaultdict(list)
    draft: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        times = (sample.verify_ms, sample.draft_ms)
        if not all(np.isfinite(ms) and ms >= 0.0 for ms in times):
            raise ValueError(f"profile times must be finite and >= 0, got {sample}")
        verify[sample.num_tokens].append(sample.verify_ms)
        if sample.is_captured:
            draft[sample.num_requests].append(sample.draft_ms)
    return CostCurves(
        context_len=context_len,
        verify={count: float(np.median(ms)) for count, ms in sorted(verify.items())},
        draft={count: float(np.median(ms)) for count, ms in sorted(draft.items())},
    )


def resolve_context_len(flag: int | None, environ: Mapping[str, str], max_model_len: int) -> int:
    """Synthetic context length of the profile: flag, else environment, else 8192.

    Cut to `max_model_len`, the model's own context.

    Raises:
        ValueError: the value isn't a positive integer; the message says where it came from.
    """
    given = [("--profile-context-len", flag)] if flag is not None else []
    given += [(name, environ[name]) for name in CONTEXT_LEN_VARIABLES if name in environ]
    source, value = (*given, ("the default", DEFAULT_CONTEXT_LEN))[0]
    try:
        context_len = int(value)
    except ValueError:
        raise ValueError(f"{source} must be a positive integer, got {value!r}") from None
    if context_len < 1:
        raise ValueError(f"{source} must be a positive integer, got {value!r}")
    return min(context_len, max_model_len)


def save_profile(path: Path, curves: Sequence[CostCurves], key: Mapping[str, Any]) -> None:
    """Writes curves and the key they hold for as JSON, in one rename, creating the folder.

    Args:
        path: the file.
        curves: one entry per context length.
        key: what the times depend on (model shape, buckets, device kind, library versions, flags);
            JSON values.
    """
    document = {
        "key": _full_key(key),
        "curves": [
            {
                "context_len": c.context_len,
                "verify": sorted(c.verify.items()),
                "draft": sorted(c.draft.items()),
            }
            for c in curves
        ],
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two servers starting at once must not write into each other's half-finished file.
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False
    ) as file:
        file.write(text)
    os.replace(file.name, path)


def load_profile(path: Path, key: Mapping[str, Any]) -> tuple[CostCurves, ...] | None:
    """Reads a profile stored under the same key.

    Returns:
        The curves, times bit for bit as saved; None when there is no file, or when it is corrupt or
        was stored under another key, which a one-line warning says (with the field that differs).
        Then the caller measures again.
    """
    try:
        stored_key, curves = _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cost profile %s ignored, unreadable: %s", path, error)
        return None
    wanted_key = _full_key(key)
    for name in sorted(stored_key.keys() | wanted_key.keys()):
        wanted, stored = wanted_key.get(name), stored_key.get(name)
        if wanted != stored:
            logger.warning(
                "cost profile %s ignored: %s is %r, stored for %r", path, name, wanted, stored
            )
            return None
    return curves


def read_profile(path: Path) -> tuple[CostCurves, ...]:
    """Reads a profile whatever it was stored under, to look at it or to simulate with it.

    Raises:
        OSError: the file can't be read.
        ValueError: it isn't a profile.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, Any], tuple[CostCurves, ...]]:
    text = path.read_text()
    try:
        document = json.loads(text)
        curves = tuple(
            CostCurves(
                context_len=entry["context_len"],
                verify={int(count): float(ms) for count, ms in entry["verify"]},
                draft={int(count): float(ms) for count, ms in entry["draft"]},
            )
            for entry in document["curves"]
        )
        key = dict(document["key"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} isn't a cost profile: {type(error).__name__}: {error}") from error
    if not curves:
        raise ValueError(f"{path} isn't a cost profile: it holds no curves")
    return key, curves


def _full_key(key: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON, so that a tuple equals the list it was stored as.
    return json.loads(json.dumps({"profile_format": FORMAT_VERSION, **key}))
