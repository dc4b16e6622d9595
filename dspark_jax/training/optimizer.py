"""Muon for matrices, AdamW for the rest, and the rule that balances experts without a loss."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from dspark_jax.model.params import Spec


def matrix_axes(specs: Any) -> Any:
    """Which leaves of a tree of `Spec` Muon takes, and along which axes; None for the others.

    Muon takes matrices [..., out, in] from features to features, but no table over the vocabulary.
    """

    def axes(spec: Spec) -> MuonDimensionNumbers | None:
        is_matrix = spec.init == "matrix" and "vocab" not in spec.axes
        return MuonDimensionNumbers(-1, -2) if is_matrix else None

    return jax.tree.map(axes, specs, is_leaf=lambda x: isinstance(x, Spec))


def build_optimizer(axes: Any, *, weight_decay: float, clip: float) -> optax.GradientTransformation:
    """Updates per unit of learning rate: multiply them by it.

    Matrices (see `matrix_axes`) are orthogonalised one by one and decay. The rest uses Adam and does not decay:
    the drafter's noise row gets no gradient in the target's training, and mask slots whose embedding had decayed
    to zero could not be told apart.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        muon(
            learning_rate=1.0,
            weight_decay=weight_decay,
            adam_b2=0.95,
            muon_weight_dimension_numbers=axes,
        ),
    )


def learning_rate(step: int, total: int | None, *, peak: float, warmup: int) -> float:
    """Linear warm-up over `warmup` steps, then a cosine that ends at zero after `total` steps.

    `total=None` means not known yet, which is fine during the warm-up.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if total is None:
        raise ValueError(f"the number of steps must be known after {warmup} warm-up steps")
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def balance(bias: jax.Array, loads: jax.Array, rate: jax.Array | float) -> jax.Array:
    """Selection bias [L, E] moved by `rate` towards idle experts and kept at mean zero.

    `loads` [L, E] are shares of the routed tokens. Only differences of the bias matter; without subtracting the
    mean, it would wander. (Loss-free balancing, DeepSeek-V3 report, section 2.1.2.)
    """
    moved = bias + rate * jnp.sign(1.0 / loads.shape[-1] - loads)
    return moved - jnp.mean(moved, axis=-1, keepdims=True)
