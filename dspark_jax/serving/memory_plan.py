"""Where the device's memory goes: weights, what every slot owns, cache pages, and the arrays of a running step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from dspark_jax.config import ModelConfig
from dspark_jax.decode.state import init_state
from dspark_jax.model.cache import PageGeometry, page_tokens
from dspark_jax.serving.flag_error import FlagError

_GIB = 2**30
# On a CPU there is no telling what else needs memory: the cache takes at most this.
_CPU_CACHE_BYTES = 2 << 30
# Temporaries of a program in copies of its logits and streams (float32), and a constant. XLA says for Flash on
# SM90: verifying 64 tokens 0.24 GiB, 2048 tokens 4.58 GiB, drafting for 64 requests 1.13 GiB.
_VERIFY_LOGIT_COPIES = 4
_DRAFT_LOGIT_COPIES = 5
_STREAM_COPIES = 4
_WORKSPACE_FLOOR = 160 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device by what they are for."""

    parameters: int
    slots: int  # all that request slots own besides pages
    page: int  # one cache page
    workspace: int  # temporaries of the largest step, estimated
    limit: int  # what the process may take

    @property
    def fitting_pages(self) -> int:
        """Pages that the rest holds, possibly negative."""
        return (self.limit - self.parameters - self.slots - self.workspace) // self.page

    def describe(self, pages: int) -> str:
        """One line for the log."""
        parts = {
            "weights": self.parameters,
            "slots": self.slots,
            f"{pages} pages": pages * self.page,
            "step": self.workspace,
        }
        text = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        total = sum(parts.values()) / _GIB
        return f"memory in GiB: {text}; {total:.2f} of {self.limit / _GIB:.2f}"


def make_plan(
    cfg: ModelConfig,
    *,
    num_slots: int,
    max_model_len: int,
    cache_dtype: Any,
    parameter_bytes: int,
    max_tokens: int,
    max_logit_rows: int,
    limit: int | None,
) -> MemoryPlan:
    """Count everything from shapes; nothing is allocated.

    Args:
        cfg: the model, without `draft` where no drafter is loaded.
        num_slots: request slots.
        max_model_len: longest sequence.
        cache_dtype: of cache rows.
        parameter_bytes: size of all weights.
        max_tokens: tokens of the largest step.
        max_logit_rows: logit rows of the largest step.
        limit: bytes that the process may take; None where nobody says, as on a CPU.
    """
    one, two = (_state_bytes(cfg, num_slots, max_model_len, cache_dtype, n) for n in (1, 2))
    verify = _VERIFY_LOGIT_COPIES * 4 * max_logit_rows * cfg.vocab_size
    verify += _STREAM_COPIES * 4 * max_tokens * cfg.hc_mult * cfg.hidden_size
    drafted = num_slots * cfg.draft.block_size if cfg.draft else 0
    draft = _DRAFT_LOGIT_COPIES * 4 * drafted * cfg.vocab_size
    slots = one - (two - one)
    workspace = max(verify, draft) + _WORKSPACE_FLOOR
    if limit is None:
        limit = parameter_bytes + slots + workspace + _CPU_CACHE_BYTES
    return MemoryPlan(
        parameters=parameter_bytes,
        slots=slots,
        page=max(two - one, 1),
        workspace=workspace,
        limit=limit,
    )


def choose_pages(
    plan: MemoryPlan, cfg: ModelConfig, *, num_slots: int, max_model_len: int, asked: int | None
) -> PageGeometry:
    """How many cache pages there are: as asked, else what memory holds, at most every slot at full length.

    Raises `FlagError` with the numbers when memory does not hold the state or one full request.
    """
    tokens = page_tokens(cfg)
    max_pages = -(-max_model_len // tokens)
    fitting = plan.fitting_pages
    pages = asked
    if pages is None:
        pages = min(fitting, num_slots * max_pages)
    if pages < max_pages or pages > fitting:
        raise FlagError(
            f"{plan.describe(max(pages, 0))}: room for {max(fitting, 0)} cache pages of "
            f"{plan.page / 2**20:.2f} MiB, {max(pages, 0)} wanted, {max_pages} needed for one request of "
            f"{max_model_len} tokens; lower --max-num-seqs, --max-num-batched-tokens or --max-model-len, set "
            "--num-pages, raise --gpu-memory-utilization, or serve fewer layers with --hf-overrides"
        )
    return PageGeometry(tokens, int(pages), max_pages)


def tree_bytes(tree: Any) -> int:
    """Bytes of arrays or abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit() -> int | None:
    """Bytes that JAX may take of its first device, or None where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def _state_bytes(
    cfg: ModelConfig, num_slots: int, max_model_len: int, cache_dtype: Any, pages: int
) -> int:
    geometry = PageGeometry(page_tokens(cfg), pages, -(-max_model_len // page_tokens(cfg)))
    return tree_bytes(
        jax.eval_shape(
            lambda: init_state(
                cfg,
                slots=num_slots,
                geometry=geometry,
                with_drafter=cfg.draft is not None,
                dtype=cache_dtype,
            )
        )
    )
