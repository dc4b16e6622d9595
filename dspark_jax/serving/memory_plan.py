"""Where the device's memory goes: weights, slots and snapshots of them, cache pages, arrays of a running step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.decode.rings import rings_of
from dspark_jax.decode.state import DecodeState, init_state
from dspark_jax.kernels.addressing import OFFSETS, reaches
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.cache import PageGeometry, page_tokens
from dspark_jax.serving.flag_error import FlagError

_GIB = 2**30
_FP8 = jnp.float8_e4m3fn
# On a CPU there is no telling what else needs memory: the cache takes at most this.
_CPU_CACHE_BYTES = 2 << 30
# Temporaries of a program in copies of its logits and streams (float32), and a constant. XLA says for Flash on
# SM90: verifying 64 tokens 0.15 GiB, 2048 tokens 5.71 GiB, drafting for 256 requests 1.00 GiB.
_VERIFY_LOGIT_COPIES = 5
_DRAFT_LOGIT_COPIES = 2
_STREAM_COPIES = 5
_WORKSPACE_FLOOR = 160 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device by what they are for."""

    parameters: int
    slots: int  # all that request slots own besides pages
    page: int  # one cache page
    workspace: int  # temporaries of the largest step, estimated
    limit: int  # what the process may take
    snapshots: int = 0  # copies of what some slots own, for the prefix cache
    fp8_pools: tuple[int, ...] = ()  # of each array of fp8 in pages, bytes in one page
    fp8_rings: tuple[int, ...] = ()  # of each array of fp8 in slots, all bytes

    @property
    def fitting_pages(self) -> int:
        """Pages that the rest holds, possibly negative."""
        fixed = self.parameters + self.slots + self.snapshots + self.workspace
        return (self.limit - fixed) // self.page

    def describe(self, pages: int) -> str:
        """One line for the log."""
        parts = {
            "weights": self.parameters,
            "slots": self.slots,
            "snapshots": self.snapshots,
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
    row_format: RowFormat = RowFormat.PLAIN,
    parameter_bytes: int,
    max_tokens: int,
    max_logit_rows: int,
    num_snapshots: int = 0,
    limit: int | None,
) -> MemoryPlan:
    """Count everything from shapes; nothing is allocated.

    Args:
        cfg: the model, without `draft` where no drafter is loaded.
        num_slots: request slots.
        max_model_len: longest sequence.
        cache_dtype: of plain cache rows.
        row_format: of the target's cache rows.
        parameter_bytes: size of all weights.
        max_tokens: tokens of the largest step.
        max_logit_rows: logit rows of the largest step.
        num_snapshots: copies of a slot's rings.
        limit: bytes that the process may take; None where nobody says, as on a CPU.
    """
    states = [
        _abstract_state(cfg, num_slots, max_model_len, cache_dtype, row_format, pages)
        for pages in (1, 2)
    ]
    one, two = map(tree_bytes, states)
    pairs = zip(*(jax.tree.leaves(state.cache) for state in states))
    fp8 = [(more.size - less.size, less.size) for less, more in pairs if less.dtype == _FP8]
    verify = _VERIFY_LOGIT_COPIES * 4 * max_logit_rows * cfg.vocab_size
    verify += _STREAM_COPIES * 4 * max_tokens * cfg.hc_mult * cfg.hidden_size
    drafted = num_slots * cfg.draft.block_size if cfg.draft else 0
    draft = _DRAFT_LOGIT_COPIES * 4 * drafted * cfg.vocab_size
    slots = one - (two - one)
    snapshots = num_snapshots * tree_bytes(rings_of(states[0])) // num_slots
    workspace = max(verify, draft) + _WORKSPACE_FLOOR
    if limit is None:
        limit = parameter_bytes + slots + snapshots + workspace + _CPU_CACHE_BYTES
    return MemoryPlan(
        parameters=parameter_bytes,
        slots=slots,
        page=max(two - one, 1),
        workspace=workspace,
        limit=limit,
        snapshots=snapshots,
        fp8_pools=tuple(sorted(growth for growth, _ in fp8 if growth)),
        fp8_rings=tuple(size for growth, size in fp8 if not growth),
    )


def choose_pages(
    plan: MemoryPlan, cfg: ModelConfig, *, num_slots: int, max_model_len: int, asked: int | None
) -> PageGeometry:
    """How many cache pages there are: as asked, else what memory holds, at most every slot at full length.

    Kernels do not reach the end of an array of fp8 between 2 and 4 GiB. Pages that would make one are left out.

    Raises `FlagError` with the numbers when memory does not hold the state or one full request, and for fp8 out of
    reach that is asked for.
    """
    tokens = page_tokens(cfg)
    max_pages = -(-max_model_len // tokens)
    fitting = plan.fitting_pages
    pages = asked
    if pages is None:
        pages = _reachable_pages(min(fitting, num_slots * max_pages), plan.fp8_pools)
    if pages < max_pages or pages > fitting:
        raise FlagError(
            f"{plan.describe(max(pages, 0))}: room for {max(fitting, 0)} cache pages of "
            f"{plan.page / 2**20:.2f} MiB, {max(pages, 0)} wanted, {max_pages} needed for one request of "
            f"{max_model_len} tokens; lower --max-num-seqs, --max-num-batched-tokens, --max-model-len or "
            "--num-prefix-snapshots, set --num-pages, raise --gpu-memory-utilization, or serve fewer layers with "
            "--hf-overrides"
        )
    arrays = {"--num-pages": [pages * size for size in plan.fp8_pools]}
    arrays["--max-num-seqs"] = list(plan.fp8_rings)
    for flag, sizes in arrays.items():
        for size in sizes:
            if not reaches(size, 1):
                raise FlagError(
                    f"--kv-cache-dtype fp8 makes an array of {size / _GIB:.2f} GiB, and kernels do not address "
                    f"one between 2 and 4 GiB; change {flag}, or use --kv-cache-dtype auto"
                )
    return PageGeometry(tokens, int(pages), max_pages)


def _reachable_pages(pages: int, pools: tuple[int, ...]) -> int:
    """The most pages, up to `pages`, that kernels reach in pools of so many bytes per page, in ascending order."""
    for size in pools:
        if not reaches(pages * size, 1):
            pages = OFFSETS // size
    return pages


def tree_bytes(tree: Any) -> int:
    """Bytes of arrays or abstract arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit() -> int | None:
    """Bytes that JAX may take of its first device, or None where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def _abstract_state(
    cfg: ModelConfig,
    num_slots: int,
    max_model_len: int,
    cache_dtype: Any,
    row_format: RowFormat,
    pages: int,
) -> DecodeState:
    geometry = PageGeometry(page_tokens(cfg), pages, -(-max_model_len // page_tokens(cfg)))
    return jax.eval_shape(
        lambda: init_state(
            cfg,
            slots=num_slots,
            geometry=geometry,
            with_drafter=cfg.draft is not None,
            dtype=cache_dtype,
            row_format=row_format,
        )
    )
