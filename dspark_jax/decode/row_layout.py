"""Which column of a packed row holds what."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dspark_jax.decode.plan import RowPlan

MAX_STOP_IDS = 9  # eight of the client's and the end-of-sequence token

INTS = (
    "slot num_prompt start samples draft_cap min_depth limit prompt_len min_len seed_low seed_high top_k "
    "wants_logprobs wants_prompt_logprobs"
).split()
"""Named int32 columns; the stop ids follow, padded with -1."""
FLOATS = "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty".split()
"""Named float32 columns."""
NUM_INTS, NUM_FLOATS = len(INTS) + MAX_STOP_IDS, len(FLOATS)

# A seed's two words keep their bits.
_INT_STRUCT = struct.Struct(f"={len(INTS) - 5}i2I3i{MAX_STOP_IDS}i")
_FLOAT_STRUCT = struct.Struct(f"={NUM_FLOATS}f")


class PackedRow(NamedTuple):
    """Bytes of NUM_INTS int32 and NUM_FLOATS float32; `min_depth`, which belongs to the step, is 0."""

    ints: bytes
    floats: bytes


def pack_row(row: RowPlan) -> PackedRow:
    """Pack one row."""
    return PackedRow(
        _INT_STRUCT.pack(
            row.slot,
            0 if row.prompt_ids is None else len(row.prompt_ids),
            row.start,
            bool(row.samples),  # may be a bool of NumPy, which is no integer to struct
            row.draft_cap,
            0,
            row.limit,
            row.prompt_len,
            row.min_len,
            row.seed & 0xFFFFFFFF,
            row.seed >> 32,
            row.top_k,
            row.wants_logprobs,
            row.wants_prompt_logprobs,
            *row.stop_ids,
            *(-1,) * (MAX_STOP_IDS - len(row.stop_ids)),
        ),
        _FLOAT_STRUCT.pack(
            row.temperature,
            row.top_p,
            row.min_p,
            row.presence_penalty,
            row.frequency_penalty,
            row.repetition_penalty,
        ),
    )
