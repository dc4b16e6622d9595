"""Matrices by column: which values they hold, and that products with them are those with the matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.kernels.expert_mlp.cases import random_weight
from dspark_jax.kernels.quantized import ColumnWeight, by_column, dequantize, take
from tests.seeds import fresh_seed


def test_columns_hold_released_values() -> None:
    for storage in ("fp8", "fp4"):
        key = jax.random.key(fresh_seed())
        matrix = dequantize(random_weight(key, (2, 48, 128), storage, jnp.float32))
        kept = by_column(matrix)
        assert isinstance(kept, ColumnWeight)
        assert kept.shape == matrix.shape
        np.testing.assert_array_equal(dequantize(kept), matrix)
        np.testing.assert_array_equal(dequantize(take(kept, (1,))), matrix[1])


def test_a_value_beyond_bfloat16_keeps_float32() -> None:
    matrix = jnp.array([[1.0, 1 + 2**-8], [3.0, 4.0]])  # bfloat16 has seven bits behind the point
    assert by_column(matrix) is matrix
    wide = by_column(matrix, is_wide=True)
    assert wide.bits.dtype == jnp.float32
    np.testing.assert_array_equal(dequantize(wide), matrix)


def test_bfloat16_and_quantized_weights_stay() -> None:
    half = jnp.ones((2, 2), jnp.bfloat16)
    assert by_column(half) is half
    packed = random_weight(jax.random.key(0), (16, 32), "fp4", jnp.float32)
    assert by_column(packed) is packed
