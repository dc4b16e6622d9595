"""Owner of the weights, the decoding state and the compiled programs of this process's device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.budget import CostTable
from dspark_jax.checkpoint.load import load_checkpoint
from dspark_jax.checkpoint.safetensors import TensorFolder
from dspark_jax.config import ModelConfig, load_config
from dspark_jax.decode.packing import PackedRows, pack
from dspark_jax.decode.plan import Logprobs, StepOutputs, StepPlan
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.decode.step import DeviceLogprobs, ModelParams
from dspark_jax.decode.verify import Method
from dspark_jax.kernels.dispatch import default_dispatch
from dspark_jax.model.cache import PageGeometry, page_tokens
from dspark_jax.serving.buckets import bucket_for, row_buckets, token_buckets
from dspark_jax.serving.config import ServeConfig
from dspark_jax.serving.executables import Executables
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.profiler import ProfileSettings, build_cost_table
from dspark_jax.serving.program_store import ProgramStore

_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# On a CPU there is no telling what else needs memory: the cache takes at most this.
_CPU_CACHE_BYTES = 2 << 30
_GPU_MEMORY_SHARE = 0.9
_CONFIDENCE_HEAD = ".confidence_head.proj.weight"


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
        profile: ProfileSettings | None,
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
            cache_dtype: of cache rows.
            profile: how to measure step times; None to leave them unknown.
        """
        self.model_config = model_config
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.buckets = buckets
        self.num_pages = geometry.pages
        self.page_size = geometry.tokens
        self.max_pages = geometry.max_pages
        self.draft_len = executables.draft_len
        self.cost_table: CostTable | None = None
        self._params = params
        self._executables = executables
        self._geometry = geometry
        self._cache_dtype = cache_dtype
        self._profile = profile
        self._page_table: tuple[np.ndarray, jax.Array] | None = None
        self.state = self.fresh_state()

    @classmethod
    def from_config(cls, config: ServeConfig) -> Executor:
        """Load the checkpoint and lay out memory. Raises `FlagError`, `ConfigError` or `CheckpointError`."""
        model_config = load_config(config.model_folder)
        config.check(model_config)
        cache_dir = config.compilation_cache_dir or default_cache_dir()
        speculative = config.speculative_config
        dispatch = default_dispatch()
        on_gpu = jax.default_backend() == "gpu"
        dtype = _DTYPES[
            ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype
        ]
        cache_dtype = _cache_dtype(config, dtype)
        limits = config.for_device(on_gpu=on_gpu)
        draft_len = model_config.draft.block_size if speculative and model_config.draft else 0
        if draft_len:
            _require_confidence_head(config.model_folder)
        buckets = token_buckets(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            draft_len=draft_len,
            ladder=limits.bucket_ladder,
            max_capture_tokens=config.capture_tokens,
        )
        model_config, target, draft = load_checkpoint(
            config.model_folder,
            dtype=dtype,
            keep_quantized=on_gpu,
            draft=speculative is not None,
            progress=True,
        )
        max_model_len = config.max_model_len or model_config.max_position_embeddings
        params = ModelParams(target=target, draft=draft)
        geometry = plan_pages(
            model_config,
            num_slots=limits.max_num_seqs,
            max_model_len=max_model_len,
            cache_dtype=cache_dtype,
            asked=config.num_pages,
            parameter_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        )
        executables = Executables(
            model_config,
            token_buckets=buckets,
            row_buckets=row_buckets(limits.max_num_seqs, limits.bucket_ladder) if draft else (),
            num_slots=limits.max_num_seqs,
            max_pages=geometry.max_pages,
            method=Method(speculative.rejection_sample_method if speculative else "standard"),
            greedy_drafts=speculative is not None and speculative.draft_sample_method == "greedy",
            dispatch=dispatch,
            store=ProgramStore(cache_dir / "programs"),
        )
        profile = None
        if speculative is not None and speculative.enable_adaptive_verification:
            profile = ProfileSettings.from_config(
                config,
                cache_dir,
                max_model_len=max_model_len,
                num_slots=limits.max_num_seqs,
                buckets=buckets,
            )
        return cls(
            model_config,
            params,
            num_slots=limits.max_num_seqs,
            geometry=geometry,
            max_model_len=max_model_len,
            executables=executables,
            buckets=buckets,
            cache_dtype=cache_dtype,
            profile=profile,
        )

    def fresh_state(self) -> DecodeState:
        """The state of empty slots."""
        return init_state(
            self.model_config,
            slots=self.num_slots,
            geometry=self._geometry,
            with_drafter=self.draft_len > 0,
            dtype=self._cache_dtype,
        )

    def max_logit_rows(self, bucket: int) -> int:
        """Rows of logits that a step of this bucket may produce."""
        return self._executables.logit_rows(bucket)

    def warm_up(self) -> None:
        """Compile every program and, for adaptive verification, measure or load the step times."""
        self._executables.compile(self._params, self.state, progress=True)
        if self._profile is not None:
            self.cost_table = build_cost_table(self, self._profile)

    def dispatch(self, plan: StepPlan) -> DeviceStep:
        """Start a step and return at once."""
        packed = pack(plan, rows=self._executables.rows(plan.bucket))
        packed = packed.replace(page_table=self._device_page_table(plan.page_table))
        verify = self._executables.verify[plan.bucket]
        self.state, outputs = verify(self._params, self.state, packed)
        confidences = self._draft(packed.rows, len(plan.rows)) if plan.drafts else None
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
        return self._draft(packed.rows, len(plan.rows))

    def _draft(self, packed: PackedRows, num_rows: int) -> tuple[jax.Array, ...]:
        """Draft for the first `num_rows` rows, as many in one call as a program holds; their confidences."""
        buckets, confidences = self._executables.row_buckets, []
        for part in packed.parts(num_rows, buckets[-1]):
            rows = bucket_for(buckets, len(part.ints))
            draft = self._executables.draft[rows]
            self.state, drafted = draft(self._params, self.state, part.resized(rows))
            confidences.append(drafted)
        return tuple(confidences)

    def _device_page_table(self, table: np.ndarray) -> jax.Array:
        """The table on the device; sent again only when the host made a new one."""
        if self._page_table is None or self._page_table[0] is not table:
            self._page_table = (table, jnp.asarray(table))
        return self._page_table[1]


def default_cache_dir() -> Path:
    """The user's cache folder for compiled programs and cost profiles."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark_jax"


def plan_pages(
    cfg: ModelConfig,
    *,
    num_slots: int,
    max_model_len: int,
    cache_dtype: Any,
    asked: int | None,
    parameter_bytes: int,
) -> PageGeometry:
    """How many cache pages there are: as asked, else what memory holds, at most every slot at full length.

    Raises `FlagError` with the numbers when memory does not hold the state or one full request.
    """
    tokens = page_tokens(cfg)
    max_pages = -(-max_model_len // tokens)

    def state_bytes(pages: int) -> int:
        geometry = PageGeometry(tokens, pages, max_pages)
        state = jax.eval_shape(
            lambda: init_state(
                cfg,
                slots=num_slots,
                geometry=geometry,
                with_drafter=cfg.draft is not None,
                dtype=cache_dtype,
            )
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    fixed = state_bytes(1) - (state_bytes(2) - state_bytes(1))
    per_page = max(state_bytes(2) - state_bytes(1), 1)
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        room = int(stats["bytes_limit"] * _GPU_MEMORY_SHARE) - parameter_bytes
    else:
        room = _CPU_CACHE_BYTES + fixed
    fitting = (room - fixed) // per_page
    pages = asked if asked is not None else min(fitting, num_slots * max_pages)
    if pages > fitting or pages < max_pages:
        raise FlagError(
            f"memory: {room / 2**30:.2f} GiB beside the weights hold {max(fitting, 0)} cache pages "
            f"({fixed / 2**30:.2f} GiB for {num_slots} slots, {per_page / 2**20:.2f} MiB a page); "
            f"{pages} wanted, {max_pages} needed for one request of {max_model_len} tokens: "
            "lower --max-num-seqs or --max-model-len, or set --num-pages"
        )
    return PageGeometry(tokens, int(pages), max_pages)


def _cache_dtype(config: ServeConfig, dtype: Any) -> Any:
    if config.kv_cache_dtype == "fp8":
        raise FlagError(
            "--kv-cache-dtype fp8 is not supported by this backend; use auto, bfloat16 or float32"
        )
    return dtype if config.kv_cache_dtype == "auto" else _DTYPES[config.kv_cache_dtype]


def _require_confidence_head(folder: Path) -> None:
    """Raise `FlagError` for a drafter that cannot say how sure it is; reads no weights."""
    if not any(name.endswith(_CONFIDENCE_HEAD) for name in TensorFolder(folder).infos):
        raise FlagError(
            f"the drafter of {folder} has no confidence head (no mtp.*{_CONFIDENCE_HEAD}); "
            "leave --speculative-config out"
        )


def _to_host(logprobs: DeviceLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        chosen=np.asarray(logprobs.chosen),
        top_ids=np.asarray(logprobs.top_ids),
        top=np.asarray(logprobs.top),
    )
