"""fp8 and fp4: exact where values are representable, nearest elsewhere, the same as both readers."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from dspark_jax.checkpoint.formats import (
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
    fp4_shapes,
    fp8_scale_shape,
)
from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.kernels.quantized import Fp4Weight, Fp8Weight, dequantize, pack_fp4_scale
from tests.seeds import fresh_seed
from torch_ref.quantization import dequantize_fp4, dequantize_fp8

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SHAPES = [(128, 128), (1, 1), (130, 257), (64, 96), (300, 40)]


def wide(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Normal values whose magnitude varies over many powers of two, with zeros among them."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-20, 20, (shape[0], 1))
    values = np.ldexp(rng.standard_normal(shape), exponent) * (rng.random(shape) > 0.1)
    return values.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_keeps_representable_matrices(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(fresh_seed())
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    exponents = rng.integers(100, 150, fp8_scale_shape(shape)).astype(np.uint8)
    matrix = decode_fp8(codes.view(ml_dtypes.float8_e4m3fn), exponents)
    np.testing.assert_array_equal(decode_fp8(*encode_fp8(matrix)), matrix)


@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (3, 160)])
def test_fp4_keeps_representable_matrices(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(fresh_seed())
    packed_shape, scale_shape = fp4_shapes(shape)
    packed = rng.integers(0, 256, packed_shape).astype(np.uint8)
    exponents = rng.integers(100, 150, scale_shape).astype(np.uint8)
    matrix = decode_fp4(packed, exponents)
    np.testing.assert_array_equal(decode_fp4(*encode_fp4(matrix)), matrix)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_scale_is_the_smallest_power_that_fits_and_codes_are_nearest(
    shape: tuple[int, int],
) -> None:
    matrix = wide(shape, fresh_seed())
    codes, exponents = encode_fp8(matrix)
    for i, j in itertools.product(*map(range, exponents.shape)):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        amax, scale = np.abs(matrix[block]).max(), 2.0 ** (int(exponents[i, j]) - 127)
        if amax == 0:
            assert scale == 1
            continue
        assert amax <= 448 * scale
        assert amax > 448 * scale / 2
        expected = torch.from_numpy(matrix[block] / np.float32(scale)).to(torch.float8_e4m3fn)
        assert codes[block].tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_fp4_scale_is_the_smallest_power_that_fits_and_codes_are_nearest() -> None:
    matrix = wide((40, 96), fresh_seed())
    packed, exponents = encode_fp4(matrix)
    rounded = decode_fp4(packed, exponents)
    values = np.array([-v for v in FP4[:0:-1]] + FP4)
    for row, run in itertools.product(range(40), range(3)):
        part = np.s_[row, 32 * run : 32 * run + 32]
        amax, scale = np.abs(matrix[part]).max(), 2.0 ** (int(exponents[row, run]) - 127)
        if amax == 0:
            assert scale == 1
            continue
        assert amax <= 6 * scale
        assert amax > 3 * scale
        error = np.abs(matrix[part].astype(np.float64) - rounded[part])
        nearest = np.abs(matrix[part].astype(np.float64)[:, None] - values * scale).min(1)
        np.testing.assert_array_equal(error, nearest)


def test_fp4_halves_go_to_the_even_code() -> None:
    halves = [(a + b) / 2 for a, b in itertools.pairwise(FP4)]
    even = [0, 1, 1, 2, 2, 4, 4]
    row = np.array([6, *halves, *[-h for h in halves], *[0] * 17], np.float32)[None]
    packed, exponents = encode_fp4(row)
    expected = [6, *even, *[-e for e in even], *[0] * 17]
    np.testing.assert_array_equal(decode_fp4(packed, exponents)[0], expected)
    assert exponents.tolist() == [[127]]


def test_fp4_puts_the_even_column_into_the_low_nibble() -> None:
    row = np.zeros((1, 32), np.float32)
    row[0, :4] = [6, -0.5, 0, 1]
    packed, _ = encode_fp4(row)
    assert packed[0, :2].tolist() == [0x97, 0x20]


@pytest.mark.parametrize(
    ("amax", "byte"), [(448, 127), (449, 128), (224, 126), (1e-44, 1), (0, 127)]
)
def test_fp8_scale_bytes_at_the_edges(amax: float, byte: int) -> None:
    codes, exponents = encode_fp8(np.array([[amax, 0]], np.float32))
    assert exponents.tolist() == [[byte]]
    assert codes.shape == (1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encode", [encode_fp8, encode_fp4])
def test_what_is_not_finite_is_refused(encode, bad: float) -> None:
    matrix = np.zeros((4, 32), np.float32)
    matrix[2, 3] = bad
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        encode(matrix)


def test_fp4_needs_whole_runs() -> None:
    with pytest.raises(CheckpointError, match="multiple of 32 values, got 40"):
        encode_fp4(np.zeros((2, 40)))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_three_fp8_readers_agree(shape: tuple[int, int]) -> None:
    codes, exponents = encode_fp8(wide(shape, fresh_seed()))
    ours = decode_fp8(codes, exponents)
    on_device = dequantize(Fp8Weight(jnp.asarray(codes), jnp.asarray(exponents)))
    np.testing.assert_array_equal(ours, on_device)
    torch_codes = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    np.testing.assert_array_equal(ours, dequantize_fp8(torch_codes, scale).numpy())


def test_all_three_fp4_readers_agree() -> None:
    packed, exponents = encode_fp4(wide((6, 96), fresh_seed()))
    ours = decode_fp4(packed, exponents)
    scale = jnp.asarray(pack_fp4_scale(exponents))
    on_device = dequantize(Fp4Weight(jnp.asarray(packed.view(np.int16)), scale))
    np.testing.assert_array_equal(ours, on_device)
    scale = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    torch_packed = torch.from_numpy(packed.view(np.int8))
    np.testing.assert_array_equal(ours, dequantize_fp4(torch_packed, scale).numpy())
