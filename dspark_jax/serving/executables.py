"""Programs compiled ahead of time, one per bucket. A shape nobody prepared is an error, never a silent compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dspark_jax.config import ModelConfig
from dspark_jax.decode.draft_step import DraftOptions, draft_step
from dspark_jax.decode.packing import PackedPlan, PackedRows
from dspark_jax.decode.row_layout import NUM_FLOATS, NUM_INTS
from dspark_jax.decode.state import DecodeState, Proposals
from dspark_jax.decode.step import (
    DeviceLogprobs,
    DeviceOutputs,
    ModelParams,
    StepOptions,
    verify_step,
)
from dspark_jax.decode.verify import Method
from dspark_jax.draft.params import context_params
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.model.params import vocabulary_params
from dspark_jax.serving.program_store import ProgramStore

Program = Callable[..., Any]

# What XLA is told besides its defaults, by platform. On a CPU a step's time goes into matrix products, which are
# library calls, and into loops that run as fast at level 1 as at 3: a higher level only compiles for longer.
# On a GPU loops and branches are recorded too, which by default are not, so that a step is a few launches and the
# host need not wait for a branch's predicate.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 1},
    "gpu": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
        ),
        "xla_gpu_graph_min_graph_size": 1,
    },
}

# Prompt tokens whose log-probabilities one step can give, however few slots there are.
_SCORED_CHUNK = 256


class Executables:
    """The verifying half for every token bucket and the drafting half for every request bucket."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        token_buckets: Sequence[int],
        row_buckets: Sequence[int],
        num_slots: int,
        max_pages: int,
        method: Method,
        greedy_drafts: bool,
        dispatch: Dispatch,
        store: ProgramStore,
    ) -> None:
        """
        Args:
            cfg: the model; its drafter, if it has one, is compiled for `row_buckets`.
            token_buckets: token counts of the verifying half, increasing.
            row_buckets: request counts of the drafting half, increasing; empty without a drafter.
            num_slots: request slots; a step has at most that many rows.
            max_pages: pages of one request.
            method: how drafts are tested.
            greedy_drafts: draft the most likely tokens whatever the temperature.
            dispatch: implementation of the kernels.
            store: where programs are kept between starts.
        """
        self._cfg = cfg
        self._token_buckets = tuple(token_buckets)
        self.row_buckets = tuple(row_buckets)
        self._num_slots = num_slots
        self._max_pages = max_pages
        self._method = method
        self._greedy_drafts = greedy_drafts
        self._dispatch = dispatch
        self._store = store
        self.verify: dict[int, Program] = {}
        self.draft: dict[int, Program] = {}

    @property
    def draft_len(self) -> int:
        """Tokens per proposal, 0 without a drafter."""
        return self._cfg.draft.block_size if self._cfg.draft and self.row_buckets else 0

    def rows(self, bucket: int) -> int:
        """Request rows of a token bucket."""
        return min(bucket, self._num_slots)

    def logit_rows(self, bucket: int) -> int:
        """Logit rows of a token bucket."""
        return logit_rows(bucket, self.draft_len, self._num_slots)

    def compile(
        self,
        params: ModelParams,
        state: DecodeState,
        *,
        progress: bool,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Load or compile what is missing for arrays like these, largest first, one thread per core.

        A program takes the leaves of what `verifying_params` or `drafting_params` leave of `params`, as a list:
        the host would walk a tree again for every call.

        Of `share` (i, n) only every n-th program, from the i-th.
        """
        params, state = jax.tree.map(_abstract, (params, state))
        verifying, drafting = verifying_params(params), drafting_params(params)
        jobs = [(self.verify, b, self._verify_program, verifying) for b in self._token_buckets]
        jobs += [(self.draft, b, self._draft_program, drafting) for b in self.row_buckets]
        jobs = [job for job in jobs if job[1] not in job[0]]
        jobs.sort(key=lambda job: -job[1])
        jobs = jobs[share[0] :: share[1]]

        def run(job: tuple[dict[int, Program], int, Callable[..., Program], ModelParams]) -> None:
            programs, bucket, build, given = job
            programs[bucket] = build(given, state, bucket)
            bar.update()

        with (
            tqdm(total=len(jobs), unit="program", desc="compiling", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            for done in [pool.submit(run, job) for job in jobs]:
                done.result()

    def _verify_program(self, params: Any, state: Any, bucket: int) -> Program:
        options = StepOptions(
            rows=self.rows(bucket),
            tokens=bucket,
            logit_rows=self.logit_rows(bucket),
            method=self._method,
            dispatch=self._dispatch,
        )
        plan = PackedPlan(
            rows=_abstract_rows(options.rows),
            prompt_ids=_abstract_array((bucket,), jnp.int32),
            budget=_abstract_array((), jnp.int32),
            page_table=_abstract_array((self._num_slots, self._max_pages), jnp.int32),
        )
        leaves, tree = jax.tree.flatten(params)

        def step(leaves: list[jax.Array], state: DecodeState, plan: PackedPlan):
            whole = jax.tree.unflatten(tree, leaves)
            return verify_step(whole, state, plan, cfg=self._cfg, options=options)

        leaf: Any = 0
        logprobs = DeviceLogprobs(chosen=leaf, top_ids=leaf, top=leaf)
        results = (state, DeviceOutputs(ints=leaf, logprobs=logprobs, prompt_logprobs=logprobs))
        return self._build(f"verify {options}\n{tree}", step, (leaves, state, plan), results)

    def _draft_program(self, params: Any, state: Any, bucket: int) -> Program:
        options = DraftOptions(
            method=self._method, greedy_drafts=self._greedy_drafts, dispatch=self._dispatch
        )
        leaves, tree = jax.tree.flatten(params)

        def step(
            leaves: list[jax.Array], proposals: Proposals, known: DecodeState, rows: PackedRows
        ):
            whole, state = jax.tree.unflatten(tree, leaves), known.replace(proposals=proposals)
            drafted, confidences = draft_step(whole, state, rows, cfg=self._cfg, options=options)
            return drafted.proposals, confidences

        arguments = (leaves, state.proposals, without_proposals(state), _abstract_rows(bucket))
        return self._build(f"draft {options}\n{tree}", step, arguments, (state.proposals, 0))

    def _build(self, key: str, step: Program, arguments: tuple[Any, ...], results: Any) -> Program:
        compiler_options = _COMPILER_OPTIONS.get(jax.default_backend(), {})
        return self._store.load_or_compile(
            f"{self._cfg}\n{key}\n{compiler_options}",
            arguments,
            results,
            lambda: jax.jit(step, donate_argnums=1).lower(*arguments).compile(compiler_options),
        )


def verifying_params(params: ModelParams) -> ModelParams:
    """What the verifying half takes: of the drafter, only what makes its context rows."""
    return params.replace(draft=params.draft and context_params(params.draft))


def drafting_params(params: ModelParams) -> ModelParams:
    """What the drafting half takes: of the target, only its vocabulary."""
    return params.replace(target=params.target and vocabulary_params(params.target))


def without_proposals(state: DecodeState) -> DecodeState:
    """What the drafting half reads beside the proposals, which alone it takes over and gives back."""
    nothing: Any = None
    return state.replace(cache=nothing, proposals=nothing)


def logit_rows(bucket: int, draft_len: int, num_slots: int) -> int:
    """Logit rows of a token bucket: all tokens, up to a full draft of every slot or a scored prompt chunk."""
    return min(bucket, max((draft_len + 1) * num_slots, _SCORED_CHUNK))


def _abstract_rows(rows: int) -> PackedRows:
    return PackedRows(
        ints=_abstract_array((rows, NUM_INTS), jnp.int32),
        floats=_abstract_array((rows, NUM_FLOATS), jnp.float32),
    )


def _abstract_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """A `ShapeDtypeStruct`, typed as the array whose place it takes in a tree."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
