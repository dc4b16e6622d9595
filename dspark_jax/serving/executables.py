"""Programs compiled ahead of time, one per bucket. A shape nobody prepared is an error, never a silent compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dspark_jax.config import ModelConfig
from dspark_jax.decode.draft_step import DraftOptions, draft_step
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import PackedPlan, PackedRows
from dspark_jax.decode.rings import Rings, copy_rings, init_snapshots, rings_of
from dspark_jax.decode.row_layout import NUM_FLOATS, NUM_INTS
from dspark_jax.decode.score import Scored, score, scored_tree
from dspark_jax.decode.settle import DeviceLogprobs, DeviceOutputs, settle
from dspark_jax.decode.state import DecodeState, Proposals, TokenCounts, set_counts
from dspark_jax.decode.step import ModelParams, verify_step
from dspark_jax.decode.verify import Method
from dspark_jax.draft.params import DraftParams, context_params
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.model.cache import Cache
from dspark_jax.model.params import vocabulary_params
from dspark_jax.serving.program_store import ProgramStore, without_jax_cache

Program = Callable[..., Any]

# What XLA is told besides its defaults, by platform. On a CPU a step's time goes into matrix products, which are
# library calls, and into loops that run as fast at level 1 as at 3: a higher level only compiles for longer. On a
# GPU XLA would merge products of the same input: at run time it copies their matrices behind each other and their
# results apart again, 3 % of a step of 1024 tokens.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 1},
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
}

# The structure of a step's outputs.
_LEAF: Any = 0
_LOGPROBS = DeviceLogprobs(chosen=_LEAF, top_ids=_LEAF, top=_LEAF)
_OUTPUTS = DeviceOutputs(ints=_LEAF, logprobs=_LOGPROBS, prompt_logprobs=_LOGPROBS)

# Prompt tokens whose log-probabilities one step can give, however few slots there are.
_SCORED_CHUNK = 256


class StepLeaves(NamedTuple):
    """What the programs take of the parameters, as lists: the host would walk a tree again for every call."""

    target: list[Any]
    context: list[Any]  # of the drafter, what makes its context rows
    draft: list[Any]  # what drafts, the target's vocabulary among it


class Executables:
    """The verifying half for every token bucket and the drafting half for every request bucket.

    Where several efforts are told apart, what draws tokens is compiled for each of them, and apart from the
    target, which is the same for all.
    """

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
        efforts: tuple[Effort, ...],
        store: ProgramStore,
        num_snapshots: int = 0,
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
            efforts: to tell apart, the greatest last; if it is the only one, a half is one program.
            store: where programs are kept between starts.
            num_snapshots: places for copies of a slot's rings.
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
        self.efforts = efforts
        self.num_snapshots = num_snapshots
        self._steps: dict[int, Program] = {}
        self._score: dict[int, Program] = {}
        self._settle: dict[tuple[int, Effort], Program] = {}
        self._draft: dict[tuple[int, Effort], Program] = {}
        self._copies: dict[str, Program] = {}
        self._set_counts: Program

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

    def verify(
        self, leaves: StepLeaves, state: DecodeState, plan: PackedPlan, effort: Effort
    ) -> tuple[DecodeState, DeviceOutputs]:
        """Run the verifying half; takes `state` over. Only sizes that were compiled are known."""
        bucket = len(plan.prompt_ids)
        if self._steps:
            return self._steps[bucket](leaves.target, leaves.context, state, plan)
        cache, scored = self._score[bucket](leaves.target, state.cache, _without_cache(state), plan)
        settle = self._settle[bucket, effort]
        return settle(leaves.context, state.replace(cache=cache), plan.rows, scored)

    def draft(
        self, leaves: StepLeaves, state: DecodeState, rows: PackedRows, effort: Effort
    ) -> tuple[DecodeState, jax.Array]:
        """Run the drafting half for as many rows as one of `row_buckets`; takes the proposals of `state` over."""
        run = self._draft[len(rows.ints), max(effort, self.efforts[0])]
        proposals, confidences = run(leaves.draft, state.proposals, _without_proposals(state), rows)
        return state.replace(proposals=proposals), confidences

    def save(self, snapshots: Rings, rings: Rings, *, slot: int, place: int) -> Rings:
        """`snapshots`, which are taken over, with the rings of `slot` at `place`."""
        return self._copies["save"](snapshots, rings, np.int32(place), np.int32(slot))

    def restore(self, rings: Rings, snapshots: Rings, *, slot: int, place: int) -> Rings:
        """`rings`, which are taken over, with what `snapshots` hold at `place` in `slot`."""
        return self._copies["restore"](rings, snapshots, np.int32(slot), np.int32(place))

    def set_counts(
        self, counts: TokenCounts, slot: int, output: np.ndarray, prompt: np.ndarray
    ) -> TokenCounts:
        """`counts`, which are taken over, with those of one slot replaced."""
        return self._set_counts(counts, np.int32(slot), output, prompt)

    def compile(
        self,
        params: ModelParams,
        state: DecodeState,
        *,
        progress: bool,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Load or compile what is missing for arrays like these, largest first, one thread per core.

        Of `share` (i, n) only every n-th size, from the i-th.
        """
        params, state = jax.tree.map(_abstract, (params, state))
        verify = self._compile_whole if len(self.efforts) == 1 else self._compile_parts
        jobs = [(verify, size) for size in self._token_buckets]
        jobs += [(self._compile_draft, size) for size in self.row_buckets]
        if self.num_snapshots:
            jobs += [(self._compile_resumption, self.num_snapshots)]
        jobs.sort(key=lambda job: -job[1])
        jobs = jobs[share[0] :: share[1]]

        def run(build: Callable[..., None], size: int) -> None:
            build(size, params, state)
            bar.update()

        with (
            tqdm(total=len(jobs), unit="size", desc="compiling", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
            without_jax_cache(),
        ):
            for done in [pool.submit(run, *job) for job in jobs]:
                done.result()

    def _options(self, bucket: int) -> StepOptions:
        return StepOptions(
            tokens=bucket,
            logit_rows=self.logit_rows(bucket),
            method=self._method,
            dispatch=self._dispatch,
        )

    def _plan(self, bucket: int) -> PackedPlan:
        return PackedPlan(
            rows=_abstract_rows(self.rows(bucket)),
            prompt_ids=_abstract_array((bucket,), jnp.int32),
            budget=_abstract_array((), jnp.int32),
            page_table=_abstract_array((self._num_slots, self._max_pages), jnp.int32),
        )

    def _compile_whole(self, bucket: int, params: ModelParams, state: DecodeState) -> None:
        if bucket in self._steps:
            return
        options, [effort] = self._options(bucket), self.efforts
        target, tree = jax.tree.flatten(params.target)
        context, drafter = jax.tree.flatten(_context(params))

        def step(target: Any, context: Any, state: DecodeState, plan: PackedPlan):
            whole = ModelParams(
                jax.tree.unflatten(tree, target), jax.tree.unflatten(drafter, context)
            )
            return verify_step(whole, state, plan, cfg=self._cfg, options=options, effort=effort)

        arguments = (target, context, state, self._plan(bucket))
        self._steps[bucket] = self._load_or_compile(
            f"step {options} {effort!r}\n{tree}\n{drafter}",
            arguments,
            (state, _OUTPUTS),
            lambda: jax.jit(step, donate_argnums=2).lower(*arguments),
        )

    def _compile_parts(self, bucket: int, params: ModelParams, state: DecodeState) -> None:
        if bucket in self._score:
            return
        options, with_taps = self._options(bucket), params.draft is not None
        target, tree = jax.tree.flatten(params.target)
        context, drafter = jax.tree.flatten(_context(params))
        plan = self._plan(bucket)
        to_score = (target, state.cache, _without_cache(state), plan)

        def run_score(target: Any, cache: Cache, known: DecodeState, plan: PackedPlan):
            whole, state = jax.tree.unflatten(tree, target), known.replace(cache=cache)
            return score(whole, state, plan, cfg=self._cfg, options=options, with_taps=with_taps)

        def run_settle(
            effort: Effort, context: Any, state: DecodeState, rows: PackedRows, scored: Scored
        ):
            draft = jax.tree.unflatten(drafter, context)
            return settle(draft, state, rows, scored, cfg=self._cfg, options=options, effort=effort)

        @cache
        def traced() -> jax.stages.Traced:
            return jax.jit(run_score, donate_argnums=1).trace(*to_score)

        def lower_settle(effort: Effort) -> jax.stages.Lowered:
            scored = jax.tree.map(_abstract_info, traced().out_info[1])
            step = jax.jit(partial(run_settle, effort), donate_argnums=1)
            return step.lower(context, state, plan.rows, scored)

        # Its shapes follow from the rest and the dtype of the target's streams; only a trace knows them.
        unknown = scored_tree(state.cache, _abstract_array((), jnp.int32), with_taps=with_taps)
        for effort in self.efforts:
            self._settle[bucket, effort] = self._load_or_compile(
                f"settle {options} {effort!r} {params.target.embed.dtype}\n{drafter}",
                (context, state, plan.rows, unknown),
                (state, _OUTPUTS),
                partial(lower_settle, effort),
            )
        self._score[bucket] = self._load_or_compile(
            f"score {options} {with_taps}\n{tree}",
            to_score,
            (state.cache, unknown),
            lambda: traced().lower(),
        )

    def _compile_draft(self, rows: int, params: ModelParams, state: DecodeState) -> None:
        options = DraftOptions(
            method=self._method, greedy_drafts=self._greedy_drafts, dispatch=self._dispatch
        )
        leaves, tree = jax.tree.flatten(_drafting(params))
        arguments = (leaves, state.proposals, _without_proposals(state), _abstract_rows(rows))

        def run_draft(
            effort: Effort, leaves: Any, proposals: Proposals, known: DecodeState, rows: PackedRows
        ):
            whole, state = jax.tree.unflatten(tree, leaves), known.replace(proposals=proposals)
            state, confidences = draft_step(
                whole, state, rows, cfg=self._cfg, options=options, effort=effort
            )
            return state.proposals, confidences

        def lower(effort: Effort) -> jax.stages.Lowered:
            return jax.jit(partial(run_draft, effort), donate_argnums=1).lower(*arguments)

        for effort in self.efforts:
            if (rows, effort) not in self._draft:
                self._draft[rows, effort] = self._load_or_compile(
                    f"draft {options} {effort!r}\n{tree}",
                    arguments,
                    (state.proposals, 0),
                    partial(lower, effort),
                )

    def _compile_resumption(self, count: int, params: ModelParams, state: DecodeState) -> None:
        number = _abstract_array((), jnp.int32)

        def build(function: Callable[..., Any], *arguments: Any) -> Program:
            lower = lambda: jax.jit(function, donate_argnums=0).lower(*arguments)
            return self._load_or_compile(function.__name__, arguments, arguments[0], lower)

        rings = rings_of(state)
        snapshots = jax.eval_shape(partial(init_snapshots, count=count), state)
        self._copies["save"] = build(copy_rings, snapshots, rings, number, number)
        self._copies["restore"] = build(copy_rings, rings, snapshots, number, number)
        size = (self._cfg.vocab_size,)
        output, prompt = _abstract_array(size, jnp.int32), _abstract_array(size, jnp.bool_)
        self._set_counts = build(set_counts, state.counts, number, output, prompt)

    def _load_or_compile(
        self,
        name: str,
        arguments: tuple[Any, ...],
        results: Any,
        lower: Callable[[], jax.stages.Lowered],
    ) -> Program:
        options = _COMPILER_OPTIONS.get(jax.default_backend(), {})
        return self._store.load_or_compile(
            f"{self._cfg}\n{name}\n{options}", arguments, results, lambda: lower().compile(options)
        )


def step_leaves(params: ModelParams) -> StepLeaves:
    """What the programs take of `params`."""
    parts = (params.target, _context(params), _drafting(params))
    return StepLeaves(*(jax.tree.leaves(part) for part in parts))


def _context(params: ModelParams) -> DraftParams | None:
    return params.draft and context_params(params.draft)


def _without_cache(state: DecodeState) -> DecodeState:
    """What scoring reads beside the cache, which alone it takes over."""
    nothing: Any = None
    return state.replace(cache=nothing)


def _without_proposals(state: DecodeState) -> DecodeState:
    """What drafting reads beside the proposals, which alone it takes over."""
    nothing: Any = None
    return state.replace(cache=nothing, proposals=nothing)


def _drafting(params: ModelParams) -> ModelParams:
    return params.replace(target=params.target and vocabulary_params(params.target))


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


def _abstract_info(info: Any) -> jax.ShapeDtypeStruct:
    """The same of what a trace says of a result."""
    return jax.ShapeDtypeStruct(info.shape, info.dtype)
