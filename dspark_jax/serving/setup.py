"""Everything about a server that follows from its flags and `config.json`, before there are weights."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.dummy import abstract_params
from dspark_jax.checkpoint.safetensors import TensorFolder
from dspark_jax.config import ModelConfig, load_config
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.decode.step import ModelParams
from dspark_jax.decode.synthetic import pack_profile
from dspark_jax.decode.verify import Method
from dspark_jax.kernels.dispatch import default_dispatch
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry
from dspark_jax.serving.buckets import row_buckets, token_buckets
from dspark_jax.serving.config import DeviceLimits, ServeConfig
from dspark_jax.serving.executables import Executables, logit_rows
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.memory_plan import choose_pages, device_limit, make_plan, tree_bytes
from dspark_jax.serving.program_store import ProgramStore

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
_CONFIDENCE_HEAD = ".confidence_head.proj.weight"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Shapes, dtypes and places of one server."""

    config: ServeConfig
    model_config: ModelConfig  # without `draft` where no drafter is served
    cache_dir: Path
    on_gpu: bool
    dtype: Any
    cache_dtype: Any  # of plain rows
    row_format: RowFormat
    limits: DeviceLimits
    buckets: tuple[int, ...]
    max_model_len: int

    @classmethod
    def from_config(cls, config: ServeConfig) -> Setup:
        """Check the flags against the checkpoint's configuration. Raises `FlagError` or `ConfigError`."""
        model_config = load_config(config.model_folder, config.hf_overrides)
        config.check(model_config)
        on_gpu = jax.default_backend() == "gpu"
        dtype = _DTYPES[
            ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype
        ]
        cache_dtype, row_format = _cache_rows(config, dtype)
        limits = config.for_device(on_gpu=on_gpu)
        if config.speculative_config is None:
            model_config = dataclasses.replace(model_config, draft=None)
        draft_len = model_config.draft.block_size if model_config.draft else 0
        if draft_len and config.load_format == "auto":
            _require_confidence_head(config.model_folder)
        return cls(
            config=config,
            model_config=model_config,
            cache_dir=config.compilation_cache_dir or default_cache_dir(),
            on_gpu=on_gpu,
            dtype=dtype,
            cache_dtype=cache_dtype,
            row_format=row_format,
            limits=limits,
            buckets=token_buckets(
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                draft_len=draft_len,
                ladder=limits.bucket_ladder,
                max_capture_tokens=config.capture_tokens,
                sizes=config.capture_sizes,
            ),
            max_model_len=config.max_model_len or model_config.max_position_embeddings,
        )

    @property
    def draft_len(self) -> int:
        """Tokens per proposal, 0 without a drafter."""
        return self.model_config.draft.block_size if self.model_config.draft else 0

    @property
    def storage(self) -> dict[str, Any]:
        """How weights are kept, as arguments of whatever makes them."""
        return {"dtype": self.dtype, "keep_quantized": self.on_gpu}

    @property
    def synthetic(self) -> np.ndarray | None:
        """What drafts are accepted by, see `init_state`."""
        acceptance = self.config.synthetic_profile
        if acceptance is None:
            return None
        return pack_profile(
            acceptance.rates,
            request_spread=acceptance.request_spread,
            round_spread=acceptance.round_spread,
            miscalibration=acceptance.miscalibration,
        )

    def lay_out(self, params: ModelParams) -> PageGeometry:
        """Cache pages beside `params`, which may be abstract. Raises `FlagError` when memory is too small."""
        plan = make_plan(
            self.model_config,
            num_slots=self.limits.max_num_seqs,
            max_model_len=self.max_model_len,
            cache_dtype=self.cache_dtype,
            row_format=self.row_format,
            parameter_bytes=tree_bytes(params),
            max_tokens=self.buckets[-1],
            max_logit_rows=logit_rows(self.buckets[-1], self.draft_len, self.limits.max_num_seqs),
            num_snapshots=self.config.num_snapshots,
            limit=device_limit(),
        )
        geometry = choose_pages(
            plan,
            self.model_config,
            num_slots=self.limits.max_num_seqs,
            max_model_len=self.max_model_len,
            asked=self.config.num_pages,
        )
        logger.info("%s", plan.describe(geometry.pages))
        return geometry

    def executables(self, geometry: PageGeometry) -> Executables:
        """The programs, not compiled yet."""
        speculative, num_slots = self.config.speculative_config, self.limits.max_num_seqs
        rows: tuple[int, ...] = ()
        if self.draft_len:
            rows = row_buckets(num_slots, self.limits.bucket_ladder, self.config.capture_sizes)
        return Executables(
            self.model_config,
            token_buckets=self.buckets,
            row_buckets=rows,
            num_slots=num_slots,
            max_pages=geometry.max_pages,
            method=Method(speculative.rejection_sample_method if speculative else "standard"),
            greedy_drafts=speculative is not None and speculative.draft_sample_method == "greedy",
            dispatch=default_dispatch(),
            efforts=(Effort.PLAIN, Effort.FULL) if self.on_gpu else (Effort.AS_NEEDED,),
            store=ProgramStore(self.cache_dir / "programs"),
            num_snapshots=self.config.num_snapshots,
        )

    def abstract_params(self) -> ModelParams:
        """Weights as a released checkpoint stores them, without memory."""
        return ModelParams(*abstract_params(self.model_config, **self.storage))

    def abstract_state(self, geometry: PageGeometry) -> DecodeState:
        """The state of empty slots, without memory."""
        return jax.eval_shape(
            lambda: init_state(
                self.model_config,
                slots=self.limits.max_num_seqs,
                geometry=geometry,
                with_drafter=self.draft_len > 0,
                dtype=self.cache_dtype,
                row_format=self.row_format,
                synthetic=self.synthetic,
            )
        )


def default_cache_dir() -> Path:
    """The user's cache folder for compiled programs and cost profiles."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark_jax"


def _cache_rows(config: ServeConfig, dtype: Any) -> tuple[Any, RowFormat]:
    """Dtype of plain cache rows, and the format of the target's, for a model of `dtype`."""
    if config.kv_cache_dtype == "fp8":
        return dtype, RowFormat.FP8
    if config.kv_cache_dtype == "auto":
        return dtype, RowFormat.PLAIN if dtype == jnp.float32 else RowFormat.ROUNDED
    return _DTYPES[config.kv_cache_dtype], RowFormat.PLAIN


def _require_confidence_head(folder: Path) -> None:
    """Raise `FlagError` for a drafter that cannot say how sure it is; reads no weights."""
    if not any(name.endswith(_CONFIDENCE_HEAD) for name in TensorFolder(folder).infos):
        raise FlagError(
            f"the drafter of {folder} has no confidence head (no mtp.*{_CONFIDENCE_HEAD}); "
            "leave --speculative-config out"
        )
