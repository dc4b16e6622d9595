"""The plan as device arrays: one integer and one float row per request, so a dispatch has few leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.decode.plan import StepPlan
from dspark_jax.decode.row_layout import FLOATS, INTS, NUM_FLOATS, NUM_INTS
from dspark_jax.decode.sampling import SamplingRows

_INT = {name: i for i, name in enumerate(INTS)}
_FLOAT = {name: i for i, name in enumerate(FLOATS)}
_PADDING_FLOATS = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 1.0], np.float32)


class PackedRows(struct.PyTreeNode):
    """The rows of a plan: all that the drafting half takes besides parameters and state."""

    ints: jax.Array | np.ndarray  # [R, NUM_INTS] int32; slot -1 marks an unused row
    floats: jax.Array | np.ndarray  # [R, NUM_FLOATS] float32

    def parts(self, num_rows: int, rows: int) -> list[PackedRows]:
        """The first `num_rows` rows, `rows` at a time; the last part may be shorter (host arrays)."""
        ints, floats = self.ints[:num_rows], self.floats[:num_rows]
        return [
            PackedRows(ints=ints[first : first + rows], floats=floats[first : first + rows])
            for first in range(0, num_rows, rows)
        ]

    def resized(self, rows: int) -> PackedRows:
        """The same rows for an executable of another size (host arrays); only unused rows may be cut off."""
        kept = min(rows, len(self.ints))
        resized = unused_rows(rows)
        resized.ints[:kept], resized.floats[:kept] = self.ints[:kept], self.floats[:kept]
        return resized


def unused_rows(rows: int) -> PackedRows:
    """Rows that no request owns, as writable host arrays."""
    floats = np.empty((rows, NUM_FLOATS), np.float32)
    floats[:] = _PADDING_FLOATS
    return PackedRows(ints=np.full((rows, NUM_INTS), -1, np.int32), floats=floats)


class PackedPlan(struct.PyTreeNode):
    """What the verifying half takes besides parameters and state."""

    rows: PackedRows
    prompt_ids: jax.Array | np.ndarray  # [T] int32, chunks of the prompt rows one behind the other
    budget: jax.Array | np.integer  # int32 scalar
    page_table: jax.Array | np.ndarray  # [slots, max_pages] int32


class Rows(struct.PyTreeNode):
    """The packed rows by name, inside the traced step."""

    slot: jax.Array
    num_prompt: jax.Array
    start: jax.Array
    samples: jax.Array
    draft_cap: jax.Array
    min_depth: jax.Array
    limit: jax.Array
    prompt_len: jax.Array
    wants_logprobs: jax.Array
    wants_prompt_logprobs: jax.Array
    sampling: SamplingRows

    @property
    def is_used(self) -> jax.Array:
        """[R] bool."""
        return self.slot >= 0

    @property
    def is_decode(self) -> jax.Array:
        """[R] bool: rows that continue from the device's own anchor."""
        return self.is_used & (self.num_prompt == 0)


def pack(plan: StepPlan, *, rows: int) -> PackedPlan:
    """Pack `plan` for an executable of `plan.bucket` tokens and `rows` request rows (NumPy, on the host)."""
    if len(plan.rows) > rows:
        raise ValueError(f"{len(plan.rows)} rows do not fit an executable of {rows}")
    packed = unused_rows(rows)
    num_rows = len(plan.rows)
    if num_rows:
        ints = b"".join([row.packed.ints for row in plan.rows])
        floats = b"".join([row.packed.floats for row in plan.rows])
        packed.ints[:num_rows] = np.frombuffer(ints, np.int32).reshape(num_rows, NUM_INTS)
        packed.floats[:num_rows] = np.frombuffer(floats, np.float32).reshape(num_rows, NUM_FLOATS)
        packed.ints[:num_rows, _INT["min_depth"]] = plan.min_depth
    prompt_ids = np.zeros(plan.bucket, np.int32)
    used = 0
    for row in plan.rows:
        if row.prompt_ids is not None:
            prompt_ids[used : used + len(row.prompt_ids)] = row.prompt_ids
            used += len(row.prompt_ids)
    return PackedPlan(
        rows=packed,
        prompt_ids=prompt_ids,
        budget=np.int32(plan.budget),
        page_table=plan.page_table,
    )


def unpack_rows(packed: PackedRows) -> Rows:
    """Name the columns of packed rows (traced)."""
    ints, floats = jnp.asarray(packed.ints), jnp.asarray(packed.floats)

    def integer(name: str) -> jax.Array:
        return ints[:, _INT[name]]

    used = integer("slot") >= 0

    def count(name: str) -> jax.Array:
        return jnp.where(used, integer(name), 0)

    seed = jnp.stack([integer("seed_low"), integer("seed_high")], axis=1)
    return Rows(
        slot=integer("slot"),
        num_prompt=count("num_prompt"),
        start=count("start"),
        samples=count("samples") == 1,
        draft_cap=count("draft_cap"),
        min_depth=count("min_depth"),
        limit=count("limit"),
        prompt_len=count("prompt_len"),
        wants_logprobs=count("wants_logprobs") == 1,
        # A decode row has no prompt tokens to describe.
        wants_prompt_logprobs=(count("wants_prompt_logprobs") == 1) & (count("num_prompt") > 0),
        sampling=SamplingRows(
            **{name: floats[:, i] for name, i in _FLOAT.items()},
            top_k=count("top_k"),
            seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
            min_len=count("min_len"),
            stop_ids=ints[:, len(INTS) :],
        ),
    )
