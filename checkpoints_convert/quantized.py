"""How quantized weights are stored: which tensors hold the codes and the scales, and which elements share a scale.

Three formats are known, in the spellings of the tools that write them (transformers, ModelOpt, compressed-tensors):

- FP8: E4M3 codes, one scale for the tensor, an expert, a row, or a block of rows by columns.
- NVFP4 of ModelOpt: two E2M1 codes a byte, an E4M3 scale for 16 columns, a float32 scale for the tensor or an expert.
- NVFP4 of compressed-tensors: the same under other names, and the float32 scale divides.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from checkpoints_convert.quantization_config import Quantization
from checkpoints_convert.tensor_files import DTYPES, TensorInfo

Shape = tuple[int, ...]

FP8, BYTES = "F8_E4M3", "U8"
PACKED = "weight_packed"
NVFP4_COLUMNS = 16
# Packed experts have no ``.weight``: transformers appends ``_scale_inv`` to their name, ModelOpt ``_weight_scale``.
FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv")
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "activation_scale")
COMPANIONS = (*FP8_SCALES, "weight_scale_2", "weight_global_scale", *ACTIVATION_SCALES)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A stored grid of factors: along each axis, element i of the weight takes factor i // block.

    ``grid`` has the weight's axes; it is the stored shape with axes of length one put in.
    """

    name: str
    grid: Shape
    block: Shape
    divides: bool = False


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A weight that is read by decoding the tensor ``code_name``. ``shape`` counts values, not bytes.

    Every scale but the first has one column. ``faults`` say why a weight cannot be read; it has no scales then.
    """

    code_name: str
    format: str
    shape: Shape
    scales: tuple[Scale, ...] = ()
    faults: tuple[str, ...] = ()


def weight_name(name: str, stored: Mapping[str, TensorInfo]) -> str:
    """The name by which tables know a tensor: packed codes go by the name of the weight that they stand for."""
    plain = f"{name.removesuffix(PACKED)}weight"
    return plain if name.endswith(f".{PACKED}") and plain not in stored else name


def stem(weight: str) -> str:
    """What the names of a weight's scales begin with."""
    return weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"


def companions(weight: str, stored: Mapping[str, TensorInfo]) -> list[str]:
    """The stored tensors that could belong to a quantized weight."""
    return [name for suffix in COMPANIONS if (name := stem(weight) + suffix) in stored]


def describe(weight: str, code_name: str, stored: Mapping[str, TensorInfo], config: Quantization) -> Quantized:
    """How the tensor ``code_name``, whose dtype is not one of ``DTYPES``, holds ``weight``."""
    codes, packed = stored[code_name], code_name != weight
    if codes.dtype == BYTES and len(codes.shape) in (2, 3):
        return _nvfp4(weight, code_name, stored, config)
    if codes.dtype == FP8 and not packed:
        return _fp8(weight, stored, config)
    known = BYTES if packed else f"{', '.join(DTYPES)}, and with their scales {FP8} and {BYTES} (NVFP4)"
    fault = f"tensor {code_name} has dtype {codes.dtype} and shape {list(codes.shape)}; only {known} convert"
    return Quantized(code_name=code_name, format=codes.dtype, shape=codes.shape, faults=(fault,))


class _Layout(NamedTuple):
    """One way to lay scales out: what it is called, the shapes it may be stored in, its grid and block."""

    name: str
    shapes: tuple[Shape, ...]
    grid: Shape
    block: Shape


def _whole(shape: Shape) -> Iterator[_Layout]:
    """One scale for the tensor or for each expert."""
    ones, lead = (1,) * len(shape), shape[:-2]
    yield _Layout("per tensor", ((), (1,), ones), ones, shape)
    if lead:
        yield _Layout("per expert", (lead, (*lead, 1), (*lead, 1, 1)), (*lead, 1, 1), (1, *shape[-2:]))


def _blocks(shape: Shape, rows: int, columns: int) -> _Layout:
    lead = shape[:-2]
    grid = (*lead, -(-shape[-2] // rows), -(-shape[-1] // columns))
    return _Layout(f"{rows}x{columns} blocks", (grid,), grid, (*(1 for _ in lead), rows, columns))


def _fp8_layouts(shape: Shape, block: tuple[int, int]) -> Iterator[_Layout]:
    yield from _whole(shape)
    rows = _blocks(shape, 1, shape[-1])
    yield rows._replace(name="per channel", shapes=(shape[:-1], rows.grid))
    yield _blocks(shape, *block)


def _fp8(weight: str, stored: Mapping[str, TensorInfo], config: Quantization) -> Quantized:
    codes = stored[weight]
    found = Quantized(code_name=weight, format=FP8, shape=codes.shape)
    if len(codes.shape) not in (2, 3) or 0 in codes.shape:
        fault = f"tensor {weight} has dtype {FP8} and shape {list(codes.shape)}; only matrices of it convert"
        return dataclasses.replace(found, faults=(fault,))
    names = [stem(weight) + suffix for suffix in FP8_SCALES[: 2 if weight.endswith(".weight") else 3]]
    scale = next((name for name in names if name in stored), None)
    if scale is None:
        fault = f"tensor {weight} has dtype {FP8} but no scale: missing tensor {' or '.join(names)}"
        return dataclasses.replace(found, faults=(fault,))
    layouts = list(_fp8_layouts(codes.shape, config.block))
    faults = list(_scale_faults(weight, codes.shape, scale, stored, tuple(DTYPES), layouts))
    if faults:
        return dataclasses.replace(found, faults=tuple(faults))
    layout = _fitting(stored[scale].shape, layouts)
    assert layout is not None
    return dataclasses.replace(found, format=f"FP8 {layout.name}", scales=(_scale(scale, layout),))


def _nvfp4(weight: str, code_name: str, stored: Mapping[str, TensorInfo], config: Quantization) -> Quantized:
    codes, packed = stored[code_name], code_name != weight
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    fine, coarse = stem(weight) + "weight_scale", stem(weight) + ("weight_global_scale" if packed else "weight_scale_2")
    fine_layouts, coarse_layouts = [_blocks(shape, 1, NVFP4_COLUMNS)], list(_whole(shape))
    faults: list[str] = []
    if config.kinds and "float4" not in config.kinds:
        said = " and ".join(sorted(config.kinds))
        faults = [f"tensor {code_name} has dtype {BYTES}, but quantization_config in config.json declares {said}"]
    elif fine not in stored and coarse not in stored:
        faults = [f"tensor {code_name} has dtype {BYTES} but no scales: missing tensor {fine} and {coarse}"]
    elif shape[-1] % NVFP4_COLUMNS or 0 in shape:
        faults = [f"tensor {code_name} holds {shape[-1]} values a row, not a multiple of {NVFP4_COLUMNS} as NVFP4 does"]
    else:
        faults += _scale_faults(weight, shape, fine, stored, (FP8,), fine_layouts)
        faults += _scale_faults(weight, shape, coarse, stored, tuple(DTYPES), coarse_layouts)
    found = Quantized(code_name=code_name, format="NVFP4", shape=shape, faults=tuple(faults))
    if faults:
        return found
    layout = _fitting(stored[coarse].shape, coarse_layouts)
    assert layout is not None
    scales = (_scale(fine, fine_layouts[0]), _scale(coarse, layout, divides=packed))
    return dataclasses.replace(found, scales=scales)


def _fitting(shape: Shape, layouts: list[_Layout]) -> _Layout | None:
    return next((layout for layout in layouts if shape in layout.shapes), None)


def _scale(name: str, layout: _Layout, *, divides: bool = False) -> Scale:
    return Scale(name=name, grid=layout.grid, block=layout.block, divides=divides)


def _scale_faults(
    weight: str,
    shape: Shape,
    name: str,
    stored: Mapping[str, TensorInfo],
    dtypes: tuple[str, ...],
    layouts: list[_Layout],
) -> Iterator[str]:
    info = stored.get(name)
    if info is None:
        yield f"missing tensor {name}, the scale of {weight}"
        return
    if info.dtype not in dtypes:
        yield f"tensor {name}, the scale of {weight}, has dtype {info.dtype}; only {', '.join(dtypes)} convert"
    if _fitting(info.shape, layouts) is None:
        known = ", ".join(f"{list(layout.shapes[-1])} {layout.name}" for layout in layouts)
        yield f"tensor {name} has shape {list(info.shape)}, no scale of {weight} {list(shape)}; known: {known}"
