"""The JAX target beside `torch_ref`: one pass without a past, and steps with caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dspark_jax.config import ModelConfig
from dspark_jax.kernels.dispatch import Dispatch
from dspark_jax.kernels.rows import RowFormat
from dspark_jax.model.batch import TokenBatch, batch_from_chunks
from dspark_jax.model.cache import Cache, PageGeometry, commit, init_cache, page_tokens
from dspark_jax.model.params import Params
from dspark_jax.model.transformer import forward, logits
from tests.parity.bridge import to_jax
from tests.quick_jit import quick_jit
from torch_ref.config import TorchRefConfig
from torch_ref.model import forward_with_states
from torch_ref.quantization import Simulation
from torch_ref.random_weights import random_weights


class Twins(NamedTuple):
    """One set of random weights in both frameworks."""

    reference: TorchRefConfig
    weights: dict[str, torch.Tensor]
    cfg: ModelConfig
    params: Params
    draft_params: Any


def make_twins(reference: TorchRefConfig, seed: int) -> Twins:
    """Random weights for `reference`, given to JAX through a checkpoint folder."""
    weights = random_weights(reference, seed)
    return Twins(reference, weights, *to_jax(weights, reference.to_released()))


def expect(
    twins: Twins, token_ids: Sequence[int], simulation: Simulation | bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [S, V] of `torch_ref` and the stream mean after each layer, [S, L, M]."""
    result, states = forward_with_states(
        twins.weights,
        twins.reference,
        torch.tensor([token_ids]),
        simulate_quantization=simulation,
    )
    means = torch.stack([state.mean(dim=2)[0] for state in states[1:]], dim=1)
    return result[0].numpy(), means.numpy()


class StepResult(NamedTuple):
    """What a step says about its flat tokens."""

    logits: jax.Array  # [T, V]
    taps: jax.Array  # [T, L, M] stream means after every layer
    cache: Cache


def run_step(
    params: Params,
    batch: TokenBatch,
    cache: Cache,
    page_table: jax.Array,
    accepted: jax.Array,
    *,
    cfg: ModelConfig,
) -> StepResult:
    """Run the target and commit the first `accepted` [R] tokens of each row."""
    out = forward(
        params,
        cfg,
        batch,
        cache,
        page_table,
        dispatch=Dispatch(),
        tap_layers=tuple(range(cfg.num_hidden_layers)),
    )
    assert out.taps is not None
    return StepResult(
        logits(params, out.hidden), out.taps, commit(out.cache, out.rows, batch, accepted)
    )


class Chunk(NamedTuple):
    """Tokens that a request brings to a step, of which the first `accepted` are kept."""

    slot: int
    token_ids: Sequence[int]
    accepted: int


@dataclass
class CachedTarget:
    """The JAX target behind its caches. What was never written is NaN: rings, pages and open rows."""

    twins: Twins
    max_len: int
    tokens: int = 24
    rows: int = 4
    slots: int = 4
    row_format: RowFormat = RowFormat.PLAIN
    program: Any = None
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        cfg = self.twins.cfg
        per_page = page_tokens(cfg)
        held = -(-self.max_len // per_page)
        geometry = PageGeometry(per_page, self.slots * held + 1, held + 1)
        # Pages in no order, and a last column that no request holds.
        order = np.random.default_rng(0).permutation(self.slots * held).reshape(self.slots, held)
        self.page_table = jnp.asarray(
            np.pad(order, ((0, 0), (0, 1)), constant_values=-1), jnp.int32
        )
        self.cache = init_cache(
            cfg, slots=self.slots, geometry=geometry, row_format=self.row_format, fill=jnp.nan
        )
        self.lengths = np.zeros(self.slots, int)
        if self.program is None:
            self.program = quick_jit(run_step, static_argnames="cfg")

    def batch(self, chunks: Sequence[Chunk]) -> tuple[TokenBatch, jax.Array]:
        """The flat batch of `chunks` at the requests' lengths, and the accepted counts [R]."""
        batch = batch_from_chunks(
            [(c.slot, int(self.lengths[c.slot]), np.asarray(c.token_ids)) for c in chunks],
            token_count=self.tokens,
            rows=self.rows,
        )
        accepted = np.zeros(self.rows, np.int32)
        accepted[: len(chunks)] = [c.accepted for c in chunks]
        return batch, jnp.asarray(accepted)

    def step(self, chunks: Sequence[Chunk]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Feed `chunks`, at most one per slot; logits and taps of each one's accepted tokens."""
        batch, accepted = self.batch(chunks)
        out = self.program(
            self.twins.params, batch, self.cache, self.page_table, accepted, cfg=self.twins.cfg
        )
        self.cache = out.cache
        results, first = [], 0
        for chunk in chunks:
            kept = slice(first, first + chunk.accepted)
            results.append((np.asarray(out.logits[kept]), np.asarray(out.taps[kept])))
            first += len(chunk.token_ids)
            self.lengths[chunk.slot] += chunk.accepted
        return results

    def prefill(self, slot: int, token_ids: Sequence[int], split: Sequence[int]) -> np.ndarray:
        """Feed a prompt in chunks of the lengths `split`; logits of all tokens [S, V]."""
        parts, first = [], 0
        for count in split:
            part = token_ids[first : first + count]
            parts.append(self.step([Chunk(slot, part, len(part))])[0][0])
            first += count
        return np.concatenate(parts)


def full_pass(
    twins: Twins, token_ids: Sequence[int], row_format: RowFormat = RowFormat.PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and taps of one JAX pass over a whole sequence, in a bucket with padding."""
    target = CachedTarget(
        twins,
        max_len=len(token_ids),
        tokens=len(token_ids) + 2,
        rows=2,
        slots=2,
        row_format=row_format,
    )
    return target.step([Chunk(1, token_ids, len(token_ids))])[0]


def random_tokens(cfg: Mapping[str, Any] | TorchRefConfig, count: int, seed: int) -> list[int]:
    """Token ids of a random text."""
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, count).tolist()
