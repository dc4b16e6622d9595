"""Which drafts a budget buys: the definition that the device's allocation is tested against."""

from dataclasses import dataclass

import numpy as np


def allocate(
    confidences: np.ndarray, draft_lens: np.ndarray, budget: int, *, min_depth: int = 0
) -> np.ndarray:
    """Drafts admitted per request: the best `budget` offered slots over all requests.

    Slots are ordered by (within `min_depth` first, survival descending, position ascending, row
    ascending). Survival is the float32 product of confidences, multiplied from the first position
    on. It never rises along a row and ties go to the earlier position, so the slots of a row always
    form a prefix; the order depends on nothing but confidences, positions and rows, so every rank
    gets the same answer.

    Args:
        confidences: float32[R, G], conditional, of the proposal about to be verified; NaN reads as
            0 and the rest is clamped to [0, 1].
        draft_lens: int[R], offered drafts, 0..G.
        budget: 0..sum(draft_lens).
        min_depth: drafts per request that come before all others.

    Returns:
        verify_lens, int32[R], with sum equal to `budget` and verify_lens <= draft_lens.

    Raises:
        ValueError: the budget is outside its range.
    """
    if not 0 <= budget <= int(draft_lens.sum()):
        raise ValueError(f"budget must be in 0..{int(draft_lens.sum())}, got {budget}")
    num_requests, draft_len = confidences.shape
    clean = np.clip(np.nan_to_num(confidences.astype(np.float32), nan=0.0), 0.0, 1.0)
    survival = np.cumprod(clean, axis=1, dtype=np.float32)
    row, position = np.divmod(np.arange(num_requests * draft_len), draft_len)
    is_offered = position < draft_lens[row]
    is_floor = position < min_depth
    # The last key of lexsort is the primary one.
    order = np.lexsort((row, position, -survival.ravel(), ~is_floor, ~is_offered))
    return np.bincount(row[order[:budget]], minlength=num_requests).astype(np.int32)


@dataclass(frozen=True)
class StepLayout:
    """Offsets of a step's flat rows.

    Attributes:
        cu_num_logits: int32[R + 1], rows of logits before each request.
        cu_q_lens: int32[rows + 1], tokens before each request; entries past R equal the total, so
            that padding requests are empty and padding tokens belong to no request.
    """

    cu_num_logits: np.ndarray
    cu_q_lens: np.ndarray


def step_layout(
    query_lens: np.ndarray, verify_lens: np.ndarray, num_rows: int | None = None
) -> StepLayout:
    """Layout the device builds: one bonus row of logits per request, mid-prompt ones included.

    Args:
        query_lens: int[R], tokens besides the drafts.
        verify_lens: int[R], admitted drafts.
        num_rows: request rows of the compiled shape, at least R; default R.
    """
    num_requests = query_lens.size
    num_rows = num_requests if num_rows is None else num_rows
    if num_rows < num_requests:
        raise ValueError(f"{num_requests} requests don't fit {num_rows} rows")
    padding = np.zeros(num_rows - num_requests, dtype=np.int32)
    return StepLayout(
        cu_num_logits=_offsets(verify_lens + 1),
        cu_q_lens=_offsets(np.concatenate([query_lens + verify_lens, padding])),
    )


def host_placeholder(query_lens: np.ndarray, draft_lens: np.ndarray, budget: int) -> StepLayout:
    """Layout the host may assume before the device allocates: right total, even split, bounds.

    A budget of 0 and a full budget are exact. Otherwise the requests with drafts, which must come
    first in the batch, get equal shares, the first ones one more, and the logits keep their
    scheduled (largest) offsets. Nothing may derive a boundary between requests from it.

    Raises:
        ValueError: the budget is outside 0..sum(draft_lens), or a request with drafts follows one
            without.
    """
    num_drafts = int(draft_lens.sum())
    if not 0 <= budget <= num_drafts:
        raise ValueError(f"budget must be in 0..{num_drafts}, got {budget}")
    if budget in (0, num_drafts):
        return step_layout(query_lens, draft_lens if budget else np.zeros_like(draft_lens))
    num_verifying = int(np.count_nonzero(draft_lens))
    if (draft_lens[num_verifying:] > 0).any():
        raise ValueError(
            f"requests with drafts must come first, got draft_lens {draft_lens.tolist()}"
        )
    shares = np.zeros_like(draft_lens)
    shares[:num_verifying] = budget // num_verifying
    shares[: budget % num_verifying] += 1
    return StepLayout(
        cu_num_logits=_offsets(draft_lens + 1), cu_q_lens=_offsets(query_lens + shares)
    )


def _offsets(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
