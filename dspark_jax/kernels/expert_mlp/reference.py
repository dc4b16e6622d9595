"""Definition of `expert_mlp`: rows sorted by expert, a few at a time through their own expert.

Also what a CPU serves with: work grows with the routed rows, not with tokens times experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.kernels.quantized import dequantize, take


def expert_mlp_reference(x, expert_ids, weights, w_gate_up, w_down, *, layer, limit) -> jax.Array:
    """See `expert_mlp` for arguments and result."""
    tokens, k = expert_ids.shape
    experts, pairs = w_gate_up.shape[1], tokens * k
    tile = 4 if pairs <= 8 else 8 if pairs <= 64 else 16 if pairs <= 256 else 32
    x = x.astype(jnp.float32)
    flat_ids, flat_weights = expert_ids.reshape(-1), weights.reshape(-1)
    # Sorted by expert, the pairs of expert e are order[first[e] : first[e] + counts[e]].
    order = jnp.argsort(flat_ids, stable=True)
    counts = jnp.sum(flat_ids[:, None] == jnp.arange(experts), axis=0)
    first = jnp.cumsum(counts) - counts
    tiles_end = jnp.cumsum((counts + tile - 1) // tile)
    # Of every tile that there may be: its expert, its pairs, and which of them are its own.
    number = jnp.arange(min(experts, pairs) + pairs // tile)
    owner = jnp.minimum(jnp.sum(tiles_end <= number[:, None], axis=1), experts - 1)
    nth = number - jnp.where(owner > 0, tiles_end[owner - 1], 0)
    place = nth[:, None] * tile + jnp.arange(tile)
    is_own = place < counts[owner][:, None]
    pair = order[jnp.minimum(first[owner][:, None] + place, pairs - 1)]
    pair_weight = jnp.where(is_own, flat_weights[pair], 0.0)
    goal = jnp.where(is_own, pair, pairs)

    def run_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = owner[i]
        gate_up = x[pair[i] // k] @ dequantize(take(w_gate_up, (layer, expert))).T
        gate, up = jnp.split(gate_up, 2, axis=-1)
        hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
        hidden = hidden * pair_weight[i][:, None]
        result = hidden @ dequantize(take(w_down, (layer, expert))).T
        return out.at[goal[i]].set(result, mode="drop")

    out = jnp.zeros((pairs, x.shape[1]), jnp.float32)
    out = jax.lax.fori_loop(0, tiles_end[-1], run_tile, out)
    return jnp.sum(out.reshape(tokens, k, -1), axis=1)
