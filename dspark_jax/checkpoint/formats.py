"""Number formats of the released files, in NumPy: fp8 in 128 x 128 blocks, fp4 in runs of 32.

Scales are ue8m0: byte b stands for 2^(b - 127) and multiplies. A block's scale is
2^ceil(log2(amax / largest)), the smallest power of two that keeps its values in range; values round to
nearest, halves to even. A matrix that is representable is therefore stored exactly.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.safetensors import CheckpointError
from dspark_jax.kernels.quantized import FP4_RUN, FP8_BLOCK

_BIAS = 127
_FP8_LARGEST = 448.0
_FP4_LARGEST = 6.0
_FP4_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
# Tables indexed by a stored byte. A byte of fp4 holds two values, looked up together as one 64-bit word.
_FP4_PAIRS = np.stack([np.tile(_FP4_VALUES, 16), np.repeat(_FP4_VALUES, 16)], -1).view(np.uint64)[
    :, 0
]
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(255) - _BIAS), np.float32(np.nan))


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an fp8 matrix [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))


def fp4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes [..., N, K/2] and scales [..., N, K/32] of an fp4 matrix [..., N, K].

    Raises `CheckpointError` when K is not a multiple of 32.
    """
    *lead, columns = shape
    if columns % FP4_RUN:
        raise CheckpointError(f"fp4 needs rows of a multiple of {FP4_RUN} values, got {columns}")
    return (*lead, columns // 2), (*lead, columns // FP4_RUN)


def encode_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round `matrix` [N, K] (any float) to e4m3 [N, K] and ue8m0 bytes [ceil(N/128), ceil(K/128)] uint8.

    Raises `CheckpointError` for NaN and infinity.
    """
    matrix = _finite(matrix)
    rows, columns = matrix.shape
    padded = np.pad(matrix, ((0, -rows % FP8_BLOCK), (0, -columns % FP8_BLOCK)))
    blocks = padded.reshape(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    exponents = _scale_bytes(np.abs(blocks).max((1, 3)), _FP8_LARGEST)
    blocks = blocks / _SCALES[exponents][:, None, :, None]
    codes = blocks.reshape(padded.shape)[:rows, :columns].astype(ml_dtypes.float8_e4m3fn)
    return codes, exponents


def decode_fp8(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The float32 matrix [N, K] of e4m3 `codes` [N, K] and ue8m0 bytes [ceil(N/128), ceil(K/128)]."""
    columns = codes.shape[1]
    values = _FP8_VALUES.take(codes.view(np.uint8))
    scales = np.repeat(_SCALES[exponents], FP8_BLOCK, axis=1)[:, :columns]
    for block, scale in enumerate(scales):
        values[block * FP8_BLOCK : (block + 1) * FP8_BLOCK] *= scale
    return values


def encode_fp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round `matrix` [N, K] (any float) to packed e2m1 [N, K/2] uint8 and ue8m0 bytes [N, K/32] uint8.

    The low nibble of a byte is the even column. Raises `CheckpointError` when K is not a multiple of 32 and for
    NaN and infinity.
    """
    matrix = _finite(matrix)
    fp4_shapes(matrix.shape)
    runs = matrix.reshape(len(matrix), -1, FP4_RUN)
    exponents = _scale_bytes(np.abs(runs).max(-1), _FP4_LARGEST)
    codes = _fp4_codes(runs / _SCALES[exponents][..., None]).reshape(matrix.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, exponents


def decode_fp4(packed: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The float32 matrix [N, K] of packed e2m1 codes [N, K/2] uint8 and ue8m0 bytes [N, K/32]."""
    rows, half = packed.shape
    runs = _FP4_PAIRS.take(packed).view(np.float32).reshape(rows, -1, FP4_RUN)
    runs *= _SCALES[exponents][..., None]
    return runs.reshape(rows, 2 * half)


def _finite(matrix: np.ndarray) -> np.ndarray:
    matrix = matrix.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise CheckpointError("a matrix with NaN or infinity cannot be quantised")
    return matrix


def _scale_bytes(amax: np.ndarray, largest: float) -> np.ndarray:
    """ue8m0 bytes of 2^ceil(log2(amax / largest)), kept among normal float32 numbers; 1 where amax is 0."""
    mantissa, exponent = np.frexp(amax.astype(np.float64) / largest)
    # frexp gives a mantissa in [0.5, 1): the power above it, or itself for an exact power of two.
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.clip(exponent + _BIAS, 1, 254).astype(np.uint8)


def _fp4_codes(values: np.ndarray) -> np.ndarray:
    """Nearest e2m1 codes, uint8; a value halfway between two takes the even code."""
    magnitude = np.abs(values)
    middles = (_FP4_MAGNITUDES[1:] + _FP4_MAGNITUDES[:-1]) / 2
    codes = np.zeros(values.shape, np.uint8)
    for code, middle in enumerate(middles):
        codes += magnitude >= middle if code % 2 else magnitude > middle
    return codes | (np.signbit(values).astype(np.uint8) << 3)
