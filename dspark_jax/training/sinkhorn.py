"""Sinkhorn normalisation with a cheap gradient, for training on a GPU.

Written straight-line, 20 iterations make a training step that hardly compiles; as a loop of array operations
they cost hundreds of small kernels per layer. Here one kernel runs all iterations and stores the sums it divided
by; its gradient walks back through them, undoing each normalisation with its stored sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_TOKENS = 128  # per program: one token per thread of four warps


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fused_sinkhorn(
    logits: jax.Array, iterations: int, eps: float, interpret: bool = False
) -> jax.Array:
    """`kernels.hyper.reference.sinkhorn` of float32 logits [..., N, N], differentiable, as one kernel each way."""
    return _forward(logits, iterations, eps, interpret)[0]


def _forward(logits, iterations, eps, interpret):
    n = logits.shape[-1]
    flat, tokens = _by_token(logits)
    shapes = [
        jax.ShapeDtypeStruct(flat.shape, jnp.float32),
        jax.ShapeDtypeStruct(((2 * iterations - 1) * n, flat.shape[1]), jnp.float32),
    ]
    out, sums = pl.pallas_call(
        functools.partial(_forward_kernel, n=n, iterations=iterations, eps=eps),
        grid=(flat.shape[1] // _TOKENS,),
        in_specs=[_spec(n * n)],
        out_specs=[_spec(s.shape[0]) for s in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sinkhorn_forward",
    )(flat)
    return _restore(out, logits.shape, tokens), (out, sums)


def _backward(iterations, eps, interpret, saved, cotangent):
    out, sums = saved
    n = cotangent.shape[-1]
    flat, tokens = _by_token(cotangent)
    grad = pl.pallas_call(
        functools.partial(_backward_kernel, n=n, iterations=iterations, eps=eps),
        grid=(flat.shape[1] // _TOKENS,),
        in_specs=[_spec(n * n), _spec(n * n), _spec(sums.shape[0])],
        out_specs=_spec(n * n),
        out_shape=jax.ShapeDtypeStruct(flat.shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sinkhorn_backward",
    )(flat, out, sums)
    return (_restore(grad, cotangent.shape, tokens),)


fused_sinkhorn.defvjp(_forward, _backward)


def _forward_kernel(logits_ref, out_ref, sums_ref, *, n: int, iterations: int, eps: float):
    """Refs are [entries, tokens]; entry j * n + k is source j, destination k."""
    logits = [[logits_ref[j * n + k, :] for k in range(n)] for j in range(n)]
    m = []
    for row in logits:
        top = functools.reduce(jnp.maximum, row)
        powers = [jnp.exp(x - top) for x in row]
        total = sum(powers)
        m.append([p / total + eps for p in powers])

    def store(step, sums):
        for a, s in enumerate(sums):
            sums_ref[step * n + a, :] = s

    def columns(m, step):
        sums = [sum(m[j][k] for j in range(n)) for k in range(n)]
        store(step, sums)
        return [[m[j][k] / (sums[k] + eps) for k in range(n)] for j in range(n)]

    def rows(m, step):
        sums = [sum(m[j]) for j in range(n)]
        store(step, sums)
        return [[x / (sums[j] + eps) for x in m[j]] for j in range(n)]

    m = columns(m, 0)
    m = jax.lax.fori_loop(0, iterations - 1, lambda i, m: columns(rows(m, 2 * i + 1), 2 * i + 2), m)
    for j in range(n):
        for k in range(n):
            out_ref[j * n + k, :] = m[j][k]


def _backward_kernel(
    cotangent_ref, out_ref, sums_ref, grad_ref, *, n: int, iterations: int, eps: float
):
    """For y = x / (s + eps) with s = sum(x): dx = (dy - sum(dy * y)) / (s + eps) and x = y * (s + eps)."""

    def load(ref):
        return [[ref[j * n + k, :] for k in range(n)] for j in range(n)]

    def undo_columns(state, step):
        m, g = state
        scale = [sums_ref[step * n + k, :] + eps for k in range(n)]
        inner = [sum(g[j][k] * m[j][k] for j in range(n)) for k in range(n)]
        g = [[(g[j][k] - inner[k]) / scale[k] for k in range(n)] for j in range(n)]
        return [[m[j][k] * scale[k] for k in range(n)] for j in range(n)], g

    def undo_rows(state, step):
        m, g = state
        scale = [sums_ref[step * n + j, :] + eps for j in range(n)]
        inner = [sum(g[j][k] * m[j][k] for k in range(n)) for j in range(n)]
        g = [[(g[j][k] - inner[j]) / scale[j] for k in range(n)] for j in range(n)]
        return [[m[j][k] * scale[j] for k in range(n)] for j in range(n)], g

    def two_steps(i, state):
        last = 2 * (iterations - 1 - i)
        return undo_rows(undo_columns(state, last), last - 1)

    state = jax.lax.fori_loop(0, iterations - 1, two_steps, (load(out_ref), load(cotangent_ref)))
    m, g = undo_columns(state, 0)
    for j in range(n):
        softmax = [x - eps for x in m[j]]
        inner = sum(g[j][k] * softmax[k] for k in range(n))
        for k in range(n):
            grad_ref[j * n + k, :] = softmax[k] * (g[j][k] - inner)


def _by_token(x: jax.Array) -> tuple[jax.Array, int]:
    """[..., N, N] as [N*N, T], T padded to whole programs with zeros, and the unpadded T."""
    n = x.shape[-1]
    flat = x.reshape(-1, n * n).T
    tokens = flat.shape[1]
    return jnp.pad(flat, ((0, 0), (0, -tokens % _TOKENS))), tokens


def _restore(flat: jax.Array, shape: tuple[int, ...], tokens: int) -> jax.Array:
    return flat[:, :tokens].T.reshape(shape)


def _spec(rows: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, _TOKENS), lambda i: (0, i))
