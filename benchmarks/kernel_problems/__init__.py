"""The kernel benchmark's problems, one file per kernel: arguments at published sizes, costs, checks, peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.kernel_problems.allocate import allocate_problems
from benchmarks.kernel_problems.compress import compress_problems
from benchmarks.kernel_problems.experts import expert_problems, plan_problems
from benchmarks.kernel_problems.hyper import hyper_problems
from benchmarks.kernel_problems.index_topk import index_topk_problems
from benchmarks.kernel_problems.latent_rows import latent_rows_problems
from benchmarks.kernel_problems.linear import linear_problems
from benchmarks.kernel_problems.problem import Problem, label
from benchmarks.kernel_problems.router import router_problems
from benchmarks.kernel_problems.sparse_mla import sparse_mla_problems
from dspark_jax.kernels.dispatch import Dispatch

__all__ = ["PROBLEMS", "Problem", "label"]

PROBLEMS: dict[str, Callable[[Dispatch], Iterator[Callable[[], Problem]]]] = {
    "sparse_mla": sparse_mla_problems,
    "index_topk": index_topk_problems,
    "router": router_problems,
    "expert_plan": plan_problems,
    "expert_mlp": expert_problems,
    "linear": linear_problems,
    "hyper": hyper_problems,
    "compress": compress_problems,
    "latent_rows": latent_rows_problems,
    "allocate": allocate_problems,
}
