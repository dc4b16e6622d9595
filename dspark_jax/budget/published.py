"""The one cost table published in a readable form: DeepSeek-V4-Flash-0731 on four B300.

Read off the figure of vLLM's blog post on adaptive verification (tensor parallel 4, capture limit
1024 tokens, context 8192), about 1 % accurate. Measured at other points than the profile's, so the
profile's points are interpolated.
"""

import numpy as np

from dspark_jax.budget.cost_profile import profile_plan
from dspark_jax.budget.cost_table import CostCurves

CONTEXT_LEN = 8192
MAX_TOKENS = 16384
MAX_REQUESTS = 256
DRAFT_LEN = 7

GRAPH_MS = {
    1: 5.1, 8: 5.35, 16: 5.6, 32: 6.3, 64: 7.9, 128: 9.5, 256: 11.5,
    512: 16.2, 768: 17.8, 1024: 20.6,
}  # fmt: skip
# No compiled shape above the limit; flat up to 2048.
EAGER_MS = {1025: 104.5, 2048: 104.5, 4096: 133.0, 8192: 136.0, 16384: 235.0}
DRAFT_MS = {
    1: 0.95, 8: 1.2, 16: 1.4, 32: 1.7, 64: 2.4, 96: 2.8, 128: 3.3, 192: 4.4, 256: 5.4,
}  # fmt: skip

EXTENSION_NOTE = (
    "verify times of compiled shapes above 1024 tokens aren't published: "
    "the slope from 256 to 1024 tokens is continued"
)


def capture_ladder(capture_limit: int) -> tuple[int, ...]:
    """Token counts that vLLM captures by default: 1, 2, 4, by 8 to 248, by 16 from 256."""
    return (1, 2, 4, *range(8, 256, 8), *range(256, capture_limit + 1, 16))


def published_curves(capture_limit: int) -> CostCurves:
    """The profile of a server that captures up to `capture_limit` tokens; 4096 holds 256 requests ×
    8 tokens.

    Above 1024 the compiled shapes are an extrapolation, see `EXTENSION_NOTE`.

    Raises:
        ValueError: the limit is below 1024, above `MAX_TOKENS`, or not on the ladder.
    """
    if not 1024 <= capture_limit <= MAX_TOKENS or capture_limit % 16:
        raise ValueError(
            f"capture_limit must be a multiple of 16 in 1024..{MAX_TOKENS}, got {capture_limit}"
        )
    graph = dict(GRAPH_MS)
    if capture_limit > 1024:
        slope = (graph[1024] - graph[256]) / (1024 - 256)
        graph[capture_limit] = graph[1024] + slope * (capture_limit - 1024)
    plan = profile_plan(
        capture_ladder(capture_limit),
        max_tokens=MAX_TOKENS,
        max_requests=MAX_REQUESTS,
        draft_len=DRAFT_LEN,
    )
    return CostCurves(
        context_len=CONTEXT_LEN,
        verify={
            shape.num_tokens: _at(graph if shape.is_captured else EAGER_MS, shape.num_tokens)
            for shape in plan
        },
        draft=DRAFT_MS,
    )


def _at(points: dict[int, float], count: int) -> float:
    return float(np.interp(count, list(points), list(points.values())))
