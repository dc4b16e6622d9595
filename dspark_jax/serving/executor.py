"""Owner of the weights, the decoding state and the compiled programs of this process's device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.budget import CostTable
from dspark_jax.checkpoint.dummy import dummy_params
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.config import ModelConfig
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.packing import PackedRows, pack
from dspark_jax.decode.plan import Logprobs, StepOutputs, StepPlan
from dspark_jax.decode.rings import init_snapshots, rings_of, with_rings
from dspark_jax.decode.settle import DeviceLogprobs
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.decode.step import ModelParams
from dspark_jax.draft.params import draft_by_column
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry
from dspark_jax.model.params import params_by_column
from dspark_jax.serving.buckets import bucket_for
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.dummy_step import run_every_program
from dspark_jax.serving.executables import Executables, step_leaves
from dspark_jax.serving.profiler import ProfileSettings, build_cost_table
from dspark_jax.serving.setup import Setup


@dataclass
class DeviceStep:
    """A dispatched step; implements `PendingStep`."""

    plan: StepPlan
    ints: jax.Array
    confidences: tuple[jax.Array, ...] | None  # one array for each call of the drafter
    logprobs: DeviceLogprobs | None
    prompt_logprobs: DeviceLogprobs | None

    def is_ready(self) -> bool:
        """True once `fetch` would not wait."""
        # JAX's types lack `is_ready`.
        leaves: tuple[Any, ...] = (self.ints, *(self.confidences or ()))
        return all(leaf.is_ready() for leaf in leaves)

    def fetch(self) -> StepOutputs:
        """Wait until the step has landed and return its outputs."""
        rows = len(self.plan.rows)
        ints = np.asarray(self.ints)[:rows]
        tokens = ints[:, :-3]
        if self.confidences is None:
            confidences = np.zeros((rows, tokens.shape[1] - 1), np.float32)
        else:
            confidences = np.concatenate([np.asarray(part) for part in self.confidences])[:rows]
        return StepOutputs(
            tokens=tokens,
            num_tokens=ints[:, -3],
            finish=ints[:, -2],
            verify_lens=ints[:, -1],
            confidences=confidences,
            logprobs=_to_host(self.logprobs),
            prompt_logprobs=_to_host(self.prompt_logprobs),
        )


class Executor:
    """Runs steps in the order of dispatch. See `executor_protocol.Executor` for what the engine relies on."""

    def __init__(
        self,
        model_config: ModelConfig,
        params: ModelParams,
        *,
        num_slots: int,
        geometry: PageGeometry,
        max_model_len: int,
        executables: Executables,
        buckets: tuple[int, ...],
        cache_dtype: Any,
        row_format: RowFormat = RowFormat.PLAIN,
        profile: ProfileSettings | None,
        synthetic: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            model_config: of the loaded model, without `draft` where no drafter is loaded.
            params: its weights, on the device.
            num_slots: request slots.
            geometry: cache pages.
            max_model_len: longest sequence.
            executables: programs, compiled by `warm_up`.
            buckets: token counts of a step, increasing.
            cache_dtype: of plain cache rows.
            row_format: of the target's cache rows.
            profile: how to measure step times; None to leave them unknown.
            synthetic: see `decode.state.init_state`.
        """
        self.model_config = model_config
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.buckets = buckets
        self.num_pages = geometry.pages
        self.page_size = geometry.tokens
        self.max_pages = geometry.max_pages
        self.draft_len = executables.draft_len
        self.num_snapshots = executables.num_snapshots
        self.cost_table: CostTable | None = None
        self._params = params
        self._leaves = step_leaves(params)
        self._executables = executables
        self._geometry = geometry
        self._cache_dtype = cache_dtype
        self._row_format = row_format
        self._profile = profile
        self._synthetic = synthetic
        self._page_table: tuple[np.ndarray, jax.Array] | None = None
        self.state = self.fresh_state()
        self._snapshots = init_snapshots(self.state, self.num_snapshots)

    @classmethod
    def from_config(cls, config: ServeConfig) -> Executor:
        """Load the checkpoint and lay out memory. Raises `FlagError`, `ConfigError` or `CheckpointError`."""
        setup = Setup.from_config(config)
        if config.load_format == "dummy":
            geometry = setup.lay_out(setup.abstract_params())
            executables = setup.executables(geometry)
            # Before the weights are there, because XLA tries matrix products on the device, which takes memory.
            executables.compile(
                setup.abstract_params(), setup.abstract_state(geometry), progress=True
            )
            target, draft = dummy_params(
                setup.model_config, **setup.storage, seed=config.seed, progress=True
            )
            params = ModelParams(target, draft)
        else:
            model_config, target, draft = load_checkpoint(
                config.model_folder,
                **setup.storage,
                draft=config.speculative_config is not None,
                overrides=config.hf_overrides,
                progress=True,
            )
            if not setup.on_gpu:
                target, draft = params_by_column(target), draft and draft_by_column(draft)
            params = ModelParams(target, draft)
            setup = dataclasses.replace(setup, model_config=model_config)
            geometry = setup.lay_out(params)
            executables = setup.executables(geometry)
        profile = None
        speculative = config.speculative_config
        if speculative is not None and speculative.enable_adaptive_verification:
            profile = ProfileSettings.from_config(
                config,
                setup.cache_dir,
                max_model_len=setup.max_model_len,
                num_slots=setup.limits.max_num_seqs,
                buckets=setup.buckets,
            )
        return cls(
            setup.model_config,
            params,
            num_slots=setup.limits.max_num_seqs,
            geometry=geometry,
            max_model_len=setup.max_model_len,
            executables=executables,
            buckets=setup.buckets,
            cache_dtype=setup.cache_dtype,
            row_format=setup.row_format,
            profile=profile,
            synthetic=setup.synthetic,
        )

    def fresh_state(self) -> DecodeState:
        """The state of empty slots."""
        return init_state(
            self.model_config,
            slots=self.num_slots,
            geometry=self._geometry,
            with_drafter=self.draft_len > 0,
            dtype=self._cache_dtype,
            row_format=self._row_format,
            synthetic=self._synthetic,
        )

    def max_logit_rows(self, bucket: int) -> int:
        """Rows of logits that a step of this bucket may produce."""
        return self._executables.logit_rows(bucket)

    def warm_up(self) -> None:
        """Compile and run every program and, for adaptive verification, measure or load the step times."""
        self._executables.compile(self._params, self.state, progress=True)
        run_every_program(
            self, self._executables.row_buckets, self._executables.efforts, progress=True
        )
        if self._profile is not None:
            self.cost_table = build_cost_table(self, self._profile)

    def dispatch(self, plan: StepPlan) -> DeviceStep:
        """Start a step and return at once."""
        packed = pack(plan, rows=self._executables.rows(plan.bucket))
        packed = packed.replace(page_table=self._device_page_table(plan.page_table))
        effort = plan.effort
        self.state, outputs = self._executables.verify(self._leaves, self.state, packed, effort)
        confidences = None
        if plan.drafts:
            confidences = self._draft(packed.rows, len(plan.rows), effort)
        wants = any(row.wants_logprobs for row in plan.rows)
        wants_prompt = any(row.wants_prompt_logprobs for row in plan.rows)
        step = DeviceStep(
            plan=plan,
            ints=outputs.ints,
            confidences=confidences,
            logprobs=outputs.logprobs if wants else None,
            prompt_logprobs=outputs.prompt_logprobs if wants_prompt else None,
        )
        fetched = (step.ints, step.confidences, step.logprobs, step.prompt_logprobs)
        for leaf in jax.tree.leaves(fetched):
            leaf.copy_to_host_async()
        return step

    def dispatch_draft(self, plan: StepPlan) -> tuple[jax.Array, ...]:
        """Start the drafting half alone, as `dispatch` does after a step with drafts; for measuring."""
        packed = pack(plan, rows=self._executables.rows(plan.bucket))
        return self._draft(packed.rows, len(plan.rows), plan.effort)

    def save_snapshot(self, slot: int, place: int) -> None:
        """Copy the rings of a slot, as the last dispatched step leaves them, to a place; returns at once."""
        self._snapshots = self._executables.save(
            self._snapshots, rings_of(self.state), slot=slot, place=place
        )

    def restore_snapshot(self, slot: int, place: int) -> None:
        """Let the next step find in a slot the rings that were saved at a place; returns at once."""
        rings = self._executables.restore(
            rings_of(self.state), self._snapshots, slot=slot, place=place
        )
        self.state = with_rings(self.state, rings)

    def set_counts(self, slot: int, output: np.ndarray, prompt: np.ndarray) -> None:
        """Let the next step find in a slot what penalties look at, see `TokenCounts`: int32 [V] and bool [V]."""
        counts = self._executables.set_counts(self.state.counts, slot, output, prompt)
        self.state = self.state.replace(counts=counts)

    def _draft(self, packed: PackedRows, num_rows: int, effort: Effort) -> tuple[jax.Array, ...]:
        """Draft for the first `num_rows` rows, as many in one call as a program holds; their confidences."""
        buckets, confidences = self._executables.row_buckets, []
        for part in packed.parts(num_rows, buckets[-1]):
            rows = bucket_for(buckets, len(part.ints))
            self.state, drafted = self._executables.draft(
                self._leaves, self.state, part.resized(rows), effort
            )
            confidences.append(drafted)
        return tuple(confidences)

    def _device_page_table(self, table: np.ndarray) -> jax.Array:
        """The table on the device; sent again only when the host made a new one."""
        if self._page_table is None or self._page_table[0] is not table:
            self._page_table = (table, jnp.asarray(table))
        return self._page_table[1]


def _to_host(logprobs: DeviceLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        chosen=np.asarray(logprobs.chosen),
        top_ids=np.asarray(logprobs.top_ids),
        top=np.asarray(logprobs.top),
    )
