"""Log-probabilities of a step, as arrays, turned into what a client gets."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.decode.plan import Logprobs
from dspark_jax.serving.request import TokenLogprob


def token_logprobs(
    logprobs: Logprobs, first_row: int, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Rows `first_row`, `first_row + 1`, ... of `logprobs`, which describe `token_ids` in order.

    Each carries the `num_top` most likely tokens of its row, most likely first.
    """
    rows = slice(first_row, first_row + len(token_ids))
    return tuple(
        TokenLogprob(token_id, chosen, dict(zip(top_ids, top)))
        for token_id, chosen, top_ids, top in zip(
            token_ids,
            logprobs.chosen[rows].tolist(),
            logprobs.top_ids[rows, :num_top].tolist(),
            logprobs.top[rows, :num_top].tolist(),
        )
    )
