"""Quantized weights made from codes and scales, with the values that they stand for worked out by hand.

Nothing here is taken from the converter: codes are decoded from their bits, and scales spread by repeating them. Scales
have few bits, so that every product is exact in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]


class Made(NamedTuple):
    """The stored tensors, and the float32 values of the weight."""

    tensors: Tensors
    values: np.ndarray


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Sign, four bits of exponent (bias 7), three of mantissa; no infinities."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent, one of mantissa: as listed by the format's definition."""
    magnitude = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)[codes & 7]
    return np.where(codes & 8, -magnitude, magnitude).astype(np.float32)


def some_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Positive numbers of three bits, exact in bfloat16 and E4M3."""
    return np.asarray(rng.integers(1, 8, shape) * 2.0 ** rng.integers(-4, 3, shape), np.float32)


def fp8_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes & 127 == 127, 3, codes).astype(np.uint8)


def stem(name: str) -> str:
    return name[: -len("weight")] if name.endswith(".weight") else name + "_"


def _stored_fp8(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn)


def fp8_blocks(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], block: tuple[int, int] = (128, 128)
) -> Made:
    """As Qwen and DeepSeek release it; packed experts as transformers names them."""
    rows, columns = block
    grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    codes, scales = fp8_codes(rng, shape), some_scales(rng, grid)
    spread = scales.repeat(rows, axis=-2).repeat(columns, axis=-1)[..., : shape[-2], : shape[-1]]
    scale_name = stem(name) + ("weight_scale_inv" if name.endswith(".weight") else "scale_inv")
    return Made({name: _stored_fp8(codes), scale_name: scales}, e4m3(codes) * spread)


def fp8_small_blocks(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Made:
    return fp8_blocks(rng, name, shape, SMALL_BLOCK)


def fp8_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Made:
    """As ModelOpt writes it; packed experts have a scale each."""
    codes, scales = fp8_codes(rng, shape), some_scales(rng, shape[:-2])
    tensors = {
        name: _stored_fp8(codes),
        f"{stem(name)}weight_scale": scales,
        f"{stem(name)}input_scale": np.array(0.5, np.float32),
    }
    return Made(tensors, e4m3(codes) * scales[..., None, None])


def fp8_channel(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Made:
    """As compressed-tensors writes it."""
    codes, scales = fp8_codes(rng, shape), some_scales(rng, (*shape[:-1], 1))
    tensors = {name: _stored_fp8(codes), f"{stem(name)}weight_scale": scales.astype(ml_dtypes.bfloat16)}
    return Made(tensors, e4m3(codes) * scales)


def _nvfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scales, and the values before the last scale."""
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = some_scales(rng, (*shape[:-1], shape[-1] // 16))
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed, scales.astype(ml_dtypes.float8_e4m3fn), e2m1(codes) * scales.repeat(16, axis=-1)


def nvfp4(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Made:
    """As ModelOpt writes it: the scale of the tensor, or of an expert, multiplies."""
    packed, scales, values = _nvfp4(rng, shape)
    last = some_scales(rng, shape[:-2])
    tensors = {
        name: packed,
        f"{stem(name)}weight_scale": scales,
        f"{stem(name)}weight_scale_2": last,
        f"{stem(name)}input_scale": np.array(0.5, np.float32),
    }
    return Made(tensors, values * last[..., None, None])


def nvfp4_packed(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Made:
    """As compressed-tensors writes it: the scale of the tensor divides. Only for names that end in ``.weight``."""
    packed, scales, values = _nvfp4(rng, shape)
    divisor = np.array([2.0 ** rng.integers(3, 9)], np.float32)
    tensors = {
        f"{stem(name)}weight_packed": packed,
        f"{stem(name)}weight_scale": scales,
        f"{stem(name)}weight_global_scale": divisor,
        f"{stem(name)}input_global_scale": np.ones(1, np.float32),
    }
    return Made(tensors, values / divisor)


SMALL_BLOCK = (8, 12)
Maker = Callable[[np.random.Generator, str, tuple[int, ...]], Made]
MAKERS: dict[str, Maker] = {
    "fp8 blocks": fp8_small_blocks,
    "fp8 tensor": fp8_tensor,
    "fp8 channel": fp8_channel,
    "nvfp4": nvfp4,
    "nvfp4 packed": nvfp4_packed,
}
