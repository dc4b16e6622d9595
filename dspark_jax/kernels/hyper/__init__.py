"""Manifold-constrained hyper-connections: into a block out of N residual streams, and back into them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from dspark_jax.kernels.dispatch import Backend, Dispatch
from dspark_jax.kernels.hyper.reference import hyper_enter_reference, hyper_leave_reference


class Entered(NamedTuple):
    """A block's input, and how its output goes back."""

    block_input: jax.Array  # [T, M], dtype of the streams
    post: jax.Array  # float32 [T, N] weight of the output in each stream
    comb: jax.Array  # float32 [T, N, N] source, destination


def hyper_enter(
    streams: jax.Array,
    w_fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    gain: jax.Array,
    *,
    layer: jax.Array | int,
    iterations: int,
    eps: float,
    norm_eps: float,
    dispatch: Dispatch,
) -> Entered:
    """Mixing weights of a block from its streams, and the normed sum of the streams that enters it.

    z = (x w_fn^T) / rms(x) for the flattened streams x, split into N, N and N*N values with one scale each:
      pre  = sigmoid(z scale_0 + base) + eps
      post = 2 sigmoid(z scale_1 + base)
      comb = Sinkhorn(softmax over destinations(z scale_2 + base) + eps): columns, then iterations - 1 times rows
             and columns, every sum with eps added.
    block_input = rms_norm(sum_j pre_j stream_j) * gain. Everything is float32 until the result is cast.

    Args:
      streams: [T, N, M]. w_fn: float32 [L, (2+N)N, N*M]; base: float32 [L, (2+N)N]; scale: float32 [L, 3];
        gain: [L, M]. The layer's rows are read from the stacks.
    """
    arguments = (streams, w_fn, base, scale, gain)
    options = {"layer": layer, "iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.hyper.pallas_triton import hyper_enter_pallas

        return Entered(*hyper_enter_pallas(*arguments, **options, dispatch=dispatch))
    return Entered(*hyper_enter_reference(*arguments, **options))


def hyper_leave(
    streams: jax.Array, output: jax.Array, post: jax.Array, comb: jax.Array, *, dispatch: Dispatch
) -> jax.Array:
    """stream_k <- post_k * output + sum_j comb[j, k] stream_j, in float32, cast to the dtype of the streams.

    Args:
      streams: [T, N, M]. output: [T, M] of the block. post: float32 [T, N]; comb: float32 [T, N, N].
    """
    if dispatch.backend is Backend.PALLAS:
        from dspark_jax.kernels.hyper.pallas_triton import hyper_leave_pallas

        return hyper_leave_pallas(streams, output, post, comb, dispatch=dispatch)
    return hyper_leave_reference(streams, output, post, comb)
