"""The released Flash and Pro models as abstract trees, and whole engine steps over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig, config_from_dict
from dspark_jax.decode.draft_step import DraftOptions, draft_step
from dspark_jax.decode.effort import Effort
from dspark_jax.decode.options import StepOptions
from dspark_jax.decode.packing import PackedPlan, PackedRows
from dspark_jax.decode.row_layout import NUM_FLOATS, NUM_INTS
from dspark_jax.decode.state import init_state
from dspark_jax.decode.step import ModelParams, verify_step
from dspark_jax.decode.verify import Method
from dspark_jax.draft.params import draft_specs
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry
from dspark_jax.model.params import Spec, param_specs
from tests.kernels.published import shape, weight

FLASH: dict[str, Any] = json.loads("""{
  "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
  "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
  "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128,
  "index_topk": 512, "max_position_embeddings": 1048576, "n_routed_experts": 256,
  "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
  "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
  "dspark_block_size": 5, "dspark_noise_token_id": 128799,
  "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256, "dspark_num_stages": 3
}""") | {"compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0]}

PRO: dict[str, Any] = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0, 0, 0],
}

SLOTS, MAX_PAGES = 64, 64


def released(model: dict[str, Any], **changes: Any) -> ModelConfig:
    """Configuration of a released model with some keys of its `config.json` changed."""
    return config_from_dict(model | changes)


def abstract_tree(specs: Any, cfg: ModelConfig) -> Any:
    """Abstract arrays for a tree of specifications, in the storage of a released checkpoint."""

    def leaf(spec: Spec) -> Any:
        storage = cfg.expert_dtype if spec.storage == "expert" else spec.storage
        if storage in ("fp8", "fp4"):
            return weight(storage, *spec.shape)
        dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16, "i64": jnp.int32}[storage]
        return shape(dtype, *spec.shape)

    return jax.tree.map(leaf, specs, is_leaf=lambda x: isinstance(x, Spec))


def steps(
    cfg: ModelConfig,
    *,
    tokens: int,
    rows: int,
    dispatch: Dispatch,
    effort: Effort,
    row_format: RowFormat = RowFormat.ROUNDED,
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Both halves of a step over quantised weights, as a GPU serves them: name -> function, abstract arguments."""
    params = ModelParams(
        target=abstract_tree(param_specs(cfg), cfg),
        draft=abstract_tree(draft_specs(cfg), cfg),
    )
    state = jax.eval_shape(
        lambda: init_state(
            cfg,
            slots=SLOTS,
            geometry=PageGeometry(tokens=256, pages=2048, max_pages=MAX_PAGES),
            with_drafter=True,
            dtype=jnp.bfloat16,
            row_format=row_format,
        )
    )
    packed = PackedRows(
        ints=shape(jnp.int32, rows, NUM_INTS),  # type: ignore[arg-type]
        floats=shape(jnp.float32, rows, NUM_FLOATS),  # type: ignore[arg-type]
    )
    plan = PackedPlan(
        rows=packed,
        prompt_ids=shape(jnp.int32, tokens),  # type: ignore[arg-type]
        budget=shape(jnp.int32),  # type: ignore[arg-type]
        page_table=shape(jnp.int32, SLOTS, MAX_PAGES),  # type: ignore[arg-type]
    )
    options = StepOptions(
        tokens=tokens, logit_rows=tokens, method=Method.STANDARD, dispatch=dispatch
    )
    drafting = DraftOptions(method=Method.STANDARD, greedy_drafts=False, dispatch=dispatch)
    verify = partial(verify_step, cfg=cfg, options=options, effort=effort)
    draft = partial(draft_step, cfg=cfg, options=drafting, effort=effort)
    return {"verify": (verify, (params, state, plan)), "draft": (draft, (params, state, packed))}
