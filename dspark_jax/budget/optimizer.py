"""How many drafted tokens a step should verify: stale confidences and a cost table → budget.

The device decides *which* drafts the budget buys, from fresh confidences; this module only decides
*how many*, from confidences of earlier proposals. Keeping the two apart keeps speculative sampling
exact (DSpark paper, section 5.2). The search is exhaustive, because expected tokens per second
isn't unimodal on a staircase of compiled shapes.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark_jax.budget.confidences import clean_confidences
from dspark_jax.budget.cost_table import CostTable

LOGITS_CHUNK_BYTES = 2**30
# Added to the survival of slots within the fairness floor, so that they come first.
_FLOOR_BONUS = 2.0
_BITS_OF_ONE = int(np.float32(1.0).view(np.uint32))


def logit_rows_in_chunk(vocab_size: int, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> int:
    """Rows of float32 logits that fit one sampler chunk, at least 1; 2076 for 129,280 tokens."""
    return max(1, chunk_bytes // (4 * vocab_size))


@dataclass(frozen=True, kw_only=True)
class BudgetLimits:
    """Hard limits of a step.

    Attributes:
        max_logit_rows: rows of logits a step may produce, drafts and one bonus row per request
            together.
    """

    max_logit_rows: int

    def __post_init__(self) -> None:
        if self.max_logit_rows < 1:
            raise ValueError(f"max_logit_rows must be at least 1, got {self.max_logit_rows}")


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy:
    """What to optimise.

    Attributes:
        mode: `adaptive` chooses the budget; `fixed` verifies every draft; `none` verifies none and
            runs no drafter.
        hysteresis: a partial budget must be predicted faster than both ends (no draft, all drafts)
            by this fraction, otherwise the better end is taken. Covers errors of the cost table; 0
            gives the plain arg-max.
        min_depth: drafts of every request that are verified whatever their confidence (fairness
            floor).
        target_token_ms: bound on the expected time per token of the slowest request. Among budgets
            that keep it the fastest wins (without hysteresis); if none does, the one that comes
            closest. None: throughput alone counts.
        prompt_cost: who pays for prompt tokens in the step. `shared`: its tokens do, so that beside
            a long prompt, which makes the step slow anyway, drafts look cheap. `sunk`: nobody does;
            prompts must be fed whatever is verified, and drafts are worth what they cost.
    """

    mode: Literal["none", "fixed", "adaptive"] = "adaptive"
    hysteresis: float = 0.01
    min_depth: int = 0
    target_token_ms: float | None = None
    prompt_cost: Literal["shared", "sunk"] = "shared"

    def __post_init__(self) -> None:
        if self.prompt_cost not in ("shared", "sunk"):
            raise ValueError(f"prompt_cost must be shared or sunk, got {self.prompt_cost!r}")
        if self.mode not in ("none", "fixed", "adaptive"):
            raise ValueError(f"mode must be none, fixed or adaptive, got {self.mode!r}")
        if not 0.0 <= self.hysteresis < 1.0:
            raise ValueError(f"hysteresis must be in [0, 1), got {self.hysteresis}")
        if self.min_depth < 0:
            raise ValueError(f"min_depth must be >= 0, got {self.min_depth}")
        if self.target_token_ms is not None and not self.target_token_ms > 0.0:
            raise ValueError(f"target_token_ms must be positive, got {self.target_token_ms}")


@dataclass(frozen=True, kw_only=True)
class BudgetDecision:
    """A budget, and what was predicted for it.

    Attributes:
        budget: drafts to verify over all requests.
        num_tokens: tokens of the step, drafts included; the step runs the smallest bucket that
            holds them.
        num_query_tokens: tokens without the drafts.
        num_draft_tokens: drafts the scheduler offered.
        num_sampling: requests that emit at least one token.
        predicted_ms: predicted step time.
        predicted_tokens: expected tokens emitted.
        plain_ms: predicted time of the same step without drafts and without the drafter.
        decode_ms: likewise, without the prompt tokens that it feeds.
        num_sanitised: confidences that were NaN or outside [0, 1]; to be added to a warning
            counter.
    """

    budget: int
    num_tokens: int
    num_query_tokens: int
    num_draft_tokens: int
    num_sampling: int
    predicted_ms: float
    predicted_tokens: float
    plain_ms: float
    decode_ms: float
    num_sanitised: int

    @property
    def tokens_per_ms(self) -> float:
        """Predicted rate of this decision."""
        return self.predicted_tokens / self.predicted_ms

    @property
    def gain(self) -> float:
        """Time that drafts save, as a share of a step that only decodes; below 0 they cost time.

        A token that no draft brings comes from ordinary decoding later, at its rate. Measured by
        the rate of the step itself drafts would always seem to pay beside a long prompt chunk.
        """
        if not self.num_sampling:
            return 0.0
        extra_tokens = self.predicted_tokens - self.num_sampling
        extra_ms = self.predicted_ms - self.plain_ms
        return extra_tokens / self.num_sampling - extra_ms / self.decode_ms


def choose_budget(
    confidences: np.ndarray,
    draft_lens: np.ndarray,
    query_lens: np.ndarray,
    samples: np.ndarray,
    cost: CostTable,
    context_len: float,
    limits: BudgetLimits,
    policy: BudgetPolicy,
    *,
    acceptance_ratio: float = 1.0,
) -> BudgetDecision:
    """The budget with the highest expected tokens per second.

    With S the survivals (cumulative products of confidences) of the offered slots in descending
    order, N the requests that sample, n all requests and T their query tokens, the budget maximises
    over every B

        (N + S[0] + … + S[B-1]) / (draft_ms(n) + verify_ms(T + B))

    from 0 to all D offered drafts, or to max_logit_rows - n where that is less (not below 0);
    ties to the smaller B. Prompt tokens are in the cost; a request still in its prompt is not in N.
    With `prompt_cost` sunk, what the step costs more than one of N tokens when nothing is drafted
    is taken off the denominator.

    Args:
        confidences: float32[R, G], conditional acceptance of each position in an *earlier* proposal
            of the request; NaN reads as 0 and the rest is clamped to [0, 1].
        draft_lens: int[R], drafts offered, 0..G; slots from there on can't be chosen.
        query_lens: int[R], tokens besides the drafts: 1 when decoding, the chunk when in the
            prompt, 0 in a padding row.
        samples: bool[R], the request emits a token in this step.
        cost: step times; must reach sum(query_lens) and the drafts that may be chosen.
        context_len: mean cached positions per request.
        limits: hard limits.
        policy: what to optimise.
        acceptance_ratio: factor for survivals, which then stay at most 1; see
            `AcceptanceCorrection`.

    Raises:
        ValueError: what may be chosen doesn't fit the cost table, an error of the scheduler,
            or `draft_lens` exceeds the number of positions.
    """
    draft_len = confidences.shape[1]
    if np.maximum.reduce(draft_lens, initial=0) > draft_len:
        raise ValueError(f"draft_lens up to {draft_lens.max()} for {draft_len} drafted positions")
    num_query_tokens = int(np.add.reduce(query_lens))
    num_draft_tokens = int(np.add.reduce(draft_lens))
    num_requests = int(np.count_nonzero(query_lens))
    num_sampling = int(np.count_nonzero(samples))
    max_budget = min(num_draft_tokens, max(0, limits.max_logit_rows - num_requests))
    if num_query_tokens + max_budget > cost.max_tokens:
        raise ValueError(
            f"{num_query_tokens} query and {max_budget} draft tokens were scheduled for a step of "
            f"at most {cost.max_tokens}"
        )

    min_depth = policy.min_depth if policy.mode == "adaptive" else 0
    num_floor = int(np.minimum(draft_lens, min_depth).sum()) if min_depth else 0
    min_budget = min(num_floor, max_budget)

    survival, num_sanitised = _survival(confidences)
    if acceptance_ratio != 1.0:
        survival *= acceptance_ratio
        np.minimum(survival, 1.0, out=survival)
    keys = survival.copy()
    if min_depth:
        keys[:min_depth] += _FLOOR_BONUS
    if num_draft_tokens < keys.size:
        is_missing = np.arange(draft_len)[:, None] >= draft_lens
        keys[is_missing], survival[is_missing] = -1.0, 0.0
    target_ms = policy.target_token_ms if policy.mode == "adaptive" and num_sampling else None
    if target_ms is None:
        # Nobody asks for the order, and sorting values alone takes half the time.
        order = None
        ranked = -np.sort(np.negative(keys, out=keys), axis=None)[:max_budget]
        if num_floor:
            ranked[:num_floor] -= _FLOOR_BONUS
    else:
        order = _descending_order(keys)[:num_draft_tokens]
        ranked = survival.take(order[:max_budget])

    # Entry i of these belongs to the budget min_budget + i.
    tokens = np.empty(max_budget + 1)
    tokens[0] = num_sampling
    tokens[1:] = ranked
    tokens = np.add.accumulate(tokens, out=tokens)[min_budget:]
    step_ms = cost.steps_ms(
        num_query_tokens + min_budget,
        num_query_tokens + max_budget,
        num_requests,
        draft=policy.mode != "none",
        context_len=context_len,
    )
    plain_ms = cost.step_ms(num_query_tokens, num_requests, draft=False, context_len=context_len)
    decode_ms = cost.step_ms(num_sampling, num_sampling, draft=False, context_len=context_len)
    is_sunk = policy.prompt_cost == "sunk" and num_query_tokens > num_sampling
    sunk_ms = max(plain_ms - decode_ms, 0.0) if is_sunk else 0.0
    rate = tokens / (step_ms - sunk_ms)

    if policy.mode == "none":
        index = 0
    elif policy.mode == "fixed":
        index = rate.size - 1
    elif target_ms is not None and order is not None:
        least = _least_tokens(survival, samples, order)[min_budget : max_budget + 1]
        slowest_ms = np.divide(step_ms, least, out=least)
        is_late = slowest_ms > max(target_ms, np.minimum.reduce(slowest_ms))
        rate[is_late] = -1.0
        index = int(rate.argmax())
    else:
        index = _fastest(rate, policy.hysteresis)
    budget = min_budget + index
    return BudgetDecision(
        budget=budget,
        num_tokens=num_query_tokens + budget,
        num_query_tokens=num_query_tokens,
        num_draft_tokens=num_draft_tokens,
        num_sampling=num_sampling,
        predicted_ms=float(step_ms[index]),
        predicted_tokens=float(tokens[index]),
        plain_ms=plain_ms,
        decode_ms=decode_ms,
        num_sanitised=num_sanitised,
    )


def _survival(confidences: np.ndarray) -> tuple[np.ndarray, int]:
    """float64[G, R] cumulative products of clean confidences; how many had to be cleaned.

    Position-major, so that the products of all rows are taken at once, and slots of equal survival
    lie in the order in which the device admits them: position, then row.
    """
    conditional = confidences.T.astype(np.float64, order="C")
    num_sanitised = 0
    # As integers without sign, NaN and what is negative or above 1 are all larger than 1.0 is.
    if np.maximum.reduce(confidences.view(np.uint32), axis=None, initial=0) > _BITS_OF_ONE:
        is_valid = (conditional >= 0.0) & (conditional <= 1.0)
        num_sanitised = conditional.size - int(np.count_nonzero(is_valid))
        conditional = clean_confidences(conditional) + 0.0  # no -0.0
    # A loop, because NumPy accumulates along a leading axis element by element.
    for before, after in itertools.pairwise(conditional):
        after *= before
    return conditional, num_sanitised


def _descending_order(keys: np.ndarray) -> np.ndarray:
    """int64[N], flat indices of float64 `keys` from the highest; ties by index, those below 0 last.

    Values nearer to each other than 2N units in the last place may count as equal: their last bits
    make room for the index, because sorting values alone takes half as long as sorting indices. The
    keys, < 4 and without -0.0, are overwritten.
    """
    index_mask = (1 << keys.size.bit_length()) - 1
    # Floats >= 0 are ordered as their bits are.
    packed = keys.reshape(-1).view(np.int64)
    packed |= index_mask
    packed -= np.arange(keys.size)
    packed.sort()
    packed &= index_mask
    return index_mask - packed[::-1]


def _fastest(rate: np.ndarray, hysteresis: float) -> int:
    """First arg-max of the rate, or the better end where the gain stays under the hysteresis."""
    best = int(np.argmax(rate))
    end = 0 if rate[0] >= rate[-1] else rate.size - 1
    # An equal rate is no reason to verify more: then the tail of the draft is expected to fail.
    is_clear = rate[best] == rate[end] or rate[best] >= (1.0 + hysteresis) * rate[end]
    return best if is_clear else end


def _least_tokens(survival: np.ndarray, samples: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Tokens that the request with the fewest expects, for every budget: float64[D + 1].

    The tokens of a request grow with the slots it gets, in their order. So those it has at budget B
    are the least that it has before any slot ranked B or later, and in the end; and the fewest of
    all requests are the least over all those slots: a running minimum from behind.

    Args:
        survival: float64[G, R], 0 in slots that aren't offered.
        samples: bool[R]; a request that emits nothing is not waited for.
        order: int[D], flat indices of the offered slots, best first; an earlier position of a
            request before a later one.
    """
    draft_len, num_requests = survival.shape
    tokens = np.empty((draft_len + 1, num_requests))
    tokens[0] = 1.0
    if not samples.all():
        tokens[0, ~samples] = np.inf
    for before, gain, after in zip(tokens, survival, tokens[1:], strict=False):
        np.add(before, gain, out=after)
    least = np.empty(order.size + 1)
    # Entry i of the flat tokens is what the request of slot i has before it.
    least[:-1] = tokens.take(order)
    least[-1] = np.minimum.reduce(tokens[-1])
    return np.minimum.accumulate(least[::-1])[::-1]
