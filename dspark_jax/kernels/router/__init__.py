"""The router's choice: the experts of each token and how much each of them counts, from the router's logits."""

from __future__ import annotations

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.router.reference import route_reference


def route(
    logits: jax.Array,
    bias: jax.Array,
    *,
    layer: jax.Array | int,
    k: int,
    scale: float,
    is_token: jax.Array,
    table: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    dispatch: Dispatch,
) -> tuple[jax.Array, jax.Array]:
    """The k experts with the highest score + bias, and weights in proportion to their scores alone.

    scores = sqrt(softplus(logits)); weights = chosen scores / (their sum + 1e-20) * scale. Experts come in falling
    order of score + bias, equals by number, lowest first. With a table, layer i < H takes the experts
    `table[i, token id]` instead, in the order of the table, and weights them in the same way.

    A token whose logits hold NaN gets k distinct experts and weights that may be NaN; others do not notice it.

    Args:
      logits: float32 [T, E]. bias: float32 [L, E], whose row `layer` is used. 1 <= k <= E.
      is_token: bool [T], False for padding.
      table: int32 [H, V, k], and token_ids: int32 [T] below V; given together.

    Returns:
      expert_ids int32 [T, k] and weights float32 [T, k]. Padding has id E and weight 0.
    """
    assert (table is None) == (token_ids is None)
    arguments = (logits, bias, is_token, table, token_ids)
    options = {"layer": layer, "k": k, "scale": scale}
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.router.pallas_triton import route_pallas

        return route_pallas(*arguments, **options, dispatch=dispatch)
    return route_reference(*arguments, **options)
