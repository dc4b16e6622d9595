"""How long the host takes to choose a budget: `python benchmarks/budget.py` prints microseconds,
256 × 7 first."""

import platform
import time

import numpy as np

from dspark_jax.budget import (
    BudgetLimits,
    BudgetPolicy,
    CostCurves,
    CostTable,
    LiveCorrection,
    choose_budget,
)


def measure(num_requests: int, draft_len: int, policy: BudgetPolicy, num_runs: int = 500) -> float:
    """Median microseconds of one call."""
    rng = np.random.default_rng(0)
    buckets = [1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16), 2048, 4096]
    cost = CostTable(
        [
            CostCurves(
                context_len=context_len,
                verify={b: scale * (5.0 + 0.015 * b) for b in buckets},
                draft={n: 1.0 + 0.017 * n for n in (1, 8, 32, 128, 256)},
            )
            for context_len, scale in ((1024, 1.0), (8192, 1.2))
        ],
        max_tokens=4096,
        max_requests=512,
        correction=LiveCorrection(buckets, 4096),
    )
    confidences = rng.uniform(0.4, 1.0, (num_requests, draft_len)).astype(np.float32)
    arguments = (
        confidences,
        np.full(num_requests, draft_len),
        np.ones(num_requests, dtype=np.int64),
        np.ones(num_requests, dtype=bool),
        cost,
        3000.0,
        BudgetLimits(max_logit_rows=2076),
        policy,
    )
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        choose_budget(*arguments)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, NumPy {np.__version__}")
    print(f"{'requests':>8} {'draft_len':>9} {'policy':>32} {'µs':>8}")
    policies = {
        "throughput": BudgetPolicy(),
        "min_depth=1": BudgetPolicy(min_depth=1),
        "target_token_ms=10": BudgetPolicy(target_token_ms=10.0),
    }
    for num_requests, draft_len in ((256, 7), (64, 7), (1, 7)):
        for name, policy in policies.items():
            us = measure(num_requests, draft_len, policy)
            print(f"{num_requests:>8} {draft_len:>9} {name:>32} {us:>8.1f}")


if __name__ == "__main__":
    main()
