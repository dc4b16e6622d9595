"""How many layers of a large model fit beside its caches, from shapes alone: no weights, no GPU.

python -m benchmarks.flash_memory
python -m benchmarks.flash_memory --layers 36      # refuse, with the numbers, if that is too many

As in `benchmarks.flash_sweep`, no prefixes are cached.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import tyro

from benchmarks.flash_model import FLASH, overrides_for
from benchmarks.result import markdown_table
from dspark_jax.checkpoint.dummy import abstract_params
from dspark_jax.config import ConfigError, load_config
from dspark_jax.serving.executables import logit_rows
from dspark_jax.serving.flag_error import FlagError
from dspark_jax.serving.memory_plan import MemoryPlan, choose_pages, make_plan, tree_bytes

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """How many layers of a large model fit beside its caches."""

    model: Path = FLASH
    """Folder with a config.json."""
    draft_len: int = 7
    """Drafted tokens."""
    layers: int | None = None
    """Ask for this many instead of looking for the most."""
    memory_gib: float = 139.0
    """The GPU's memory."""
    gpu_memory_utilization: float = 0.92
    """The server's flag."""
    max_num_seqs: tuple[int, ...] = (256, 32, 8)
    """Request slots of each row of the table."""
    max_model_len: tuple[int, ...] = (2048, 33792, 131072)
    """Longest sequence of each row."""
    max_num_batched_tokens: int = 2048
    """The server's flag."""


def plan_for(
    options: Options, layers: int, num_slots: int, max_model_len: int
) -> tuple[MemoryPlan, int]:
    """The plan of a server with so many layers, and its cache pages.

    Raises `FlagError` when it does not fit with every slot at full length, `ConfigError` for impossible layers.
    """
    overrides = overrides_for(options.model, layers=layers, draft_len=options.draft_len)
    cfg = load_config(options.model, overrides)
    params = abstract_params(cfg, dtype=jnp.bfloat16, keep_quantized=True)
    tokens = options.max_num_batched_tokens
    plan = make_plan(
        cfg,
        num_slots=num_slots,
        max_model_len=max_model_len,
        cache_dtype=jnp.bfloat16,
        parameter_bytes=tree_bytes(params),
        max_tokens=tokens,
        max_logit_rows=logit_rows(tokens, options.draft_len, num_slots),
        limit=int(options.memory_gib * options.gpu_memory_utilization * _GIB),
    )
    geometry = choose_pages(plan, cfg, num_slots=num_slots, max_model_len=max_model_len, asked=None)
    full = num_slots * geometry.max_pages
    choose_pages(plan, cfg, num_slots=num_slots, max_model_len=max_model_len, asked=full)
    return plan, full


def most_layers(options: Options, num_slots: int, max_model_len: int) -> int:
    """The most layers that fit. Raises `FlagError` when not even the fewest do."""
    cfg = load_config(options.model)
    assert cfg.draft is not None
    low, high = len(cfg.draft.target_layer_ids), cfg.num_hidden_layers
    plan_for(options, low, num_slots, max_model_len)
    while low < high:
        middle = (low + high + 1) // 2
        try:
            plan_for(options, middle, num_slots, max_model_len)
            low = middle
        except FlagError:
            high = middle - 1
    return low


def main(argv: list[str] | None = None) -> int:
    """Print the table; 2 when the layers asked for do not fit."""
    options = tyro.cli(Options, args=argv)
    rows = []
    try:
        if len(options.max_num_seqs) != len(options.max_model_len):
            raise FlagError("--max-num-seqs and --max-model-len need as many values each")
        for num_slots, max_model_len in zip(options.max_num_seqs, options.max_model_len):
            layers = options.layers or most_layers(options, num_slots, max_model_len)
            plan, pages = plan_for(options, layers, num_slots, max_model_len)
            total = plan.parameters + plan.slots + pages * plan.page + plan.workspace
            rows.append(
                {
                    "requests": num_slots,
                    "context": max_model_len,
                    "layers": layers,
                    "weights, GiB": plan.parameters / _GIB,
                    "slots, GiB": plan.slots / _GIB,
                    "pages, GiB": pages * plan.page / _GIB,
                    "step, GiB": plan.workspace / _GIB,
                    "total, GiB": total / _GIB,
                    "limit, GiB": plan.limit / _GIB,
                }
            )
    except (FlagError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
