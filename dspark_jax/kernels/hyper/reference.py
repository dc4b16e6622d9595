"""Definition of `hyper_enter` and `hyper_leave`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def hyper_enter_reference(
    streams, w_fn, base, scale, gain, *, layer, iterations, eps, norm_eps
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `hyper_enter` for arguments; block input, post, comb."""
    n = streams.shape[-2]
    wide = streams.astype(jnp.float32)
    x = wide.reshape(*wide.shape[:-2], -1)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm_eps)
    z = jnp.einsum("...k,nk->...n", x, w_fn[layer], precision=jax.lax.Precision.HIGHEST)
    pre, post, comb = jnp.split(z * inverse_rms, [n, 2 * n], axis=-1)
    b_pre, b_post, b_comb = jnp.split(base[layer], [n, 2 * n])
    pre = jax.nn.sigmoid(pre * scale[layer, 0] + b_pre) + eps
    post = 2 * jax.nn.sigmoid(post * scale[layer, 1] + b_post)
    comb = (comb * scale[layer, 2] + b_comb).reshape(*comb.shape[:-1], n, n)
    entered = jnp.einsum("...n,...nm->...m", pre, wide)
    entered *= jax.lax.rsqrt(jnp.mean(jnp.square(entered), axis=-1, keepdims=True) + norm_eps)
    entered *= gain[layer].astype(jnp.float32)
    return entered.astype(streams.dtype), post, sinkhorn(comb, iterations, eps)


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Near doubly stochastic matrix of logits [..., N, N]: a row softmax, then columns and rows in turn.

    Ends on columns: 1 + (iterations - 1) column normalisations, iterations - 1 row normalisations.
    """

    def columns(m: jax.Array) -> jax.Array:
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    def rows_then_columns(_, m: jax.Array) -> jax.Array:
        return columns(m / (jnp.sum(m, axis=1, keepdims=True) + eps))

    # The matrix first, [N, N, ...]: a CPU then works on a vector of tokens, and N is too short for one.
    first = columns(jnp.moveaxis(jax.nn.softmax(logits, axis=-1) + eps, (-2, -1), (0, 1)))
    last = jax.lax.fori_loop(0, iterations - 1, rows_then_columns, first)
    return jnp.moveaxis(last, (0, 1), (-2, -1))


def hyper_leave_reference(streams, output, post, comb) -> jax.Array:
    """See `hyper_leave` for arguments and result."""
    wide, out, n = streams.astype(jnp.float32), output.astype(jnp.float32), streams.shape[-2]

    # Written out: for a matrix as small as N by N the product of a CPU's library is slower.
    def stream(k: int) -> jax.Array:
        mixed = post[..., k, None] * out
        for j in range(n):
            mixed += comb[..., j, k, None] * wide[..., j, :]
        return mixed

    return jnp.stack([stream(k) for k in range(n)], axis=-2).astype(streams.dtype)
