"""Quantized folders read as the values that they stand for, and say what is wrong where they cannot be read."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkpoints_convert.values
import checkpoints_convert.weight_folder
from checkpoints_convert import load_hf
from checkpoints_convert.convert import convert
from checkpoints_convert.quantization_config import METHODS, read_quantization
from checkpoints_convert.summary import inspect
from checkpoints_convert.synthetic import stored_shapes
from checkpoints_convert.tensor_files import TensorFolder
from checkpoints_convert.weight_folder import WeightFolder
from tests.checkpoints_convert.folders import (
    CONFIGS,
    Tensors,
    assert_same_model,
    config_of,
    per_expert_names,
    random_tensors,
    write,
)
from tests.checkpoints_convert.quantized_tensors import (
    MAKERS,
    SMALL_BLOCK,
    Made,
    Maker,
    fp8_blocks,
    fp8_channel,
    fp8_small_blocks,
    fp8_tensor,
    nvfp4,
    nvfp4_packed,
)
from tests.checkpoints_convert.test_errors import refusal
from wmtp_jax.checkpoint import load_checkpoint
from wmtp_jax.errors import UserError

SMALL_BLOCKS = {"quant_method": "fp8", "weight_block_size": list(SMALL_BLOCK)}


def made(maker: Maker, name: str, shape: tuple[int, ...]) -> Made:
    return maker(np.random.default_rng(3), name, shape)


def reshaped(maker: Maker, companion: str, shape: tuple[int, ...]) -> Maker:
    """The same weight with a scale that is stored in another shape."""

    def make(rng, name, weight_shape):
        tensors, values = maker(rng, name, weight_shape)
        scale = next(n for n in tensors if n.endswith(companion))
        return Made({**tensors, scale: tensors[scale].reshape(shape)}, values)

    return make


READ = {
    "default blocks": ({}, fp8_blocks, "x.weight", (130, 257), "FP8 128x128 blocks"),
    "small blocks": ({"quantization_config": SMALL_BLOCKS}, fp8_small_blocks, "x.weight", (21, 30), "FP8 8x12 blocks"),
    "one block": ({}, fp8_blocks, "x.weight", (7, 5), "FP8 per tensor"),
    "blocks by groups": (
        {"quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "block_structure": "4x6"}}},
        }},
        partial(fp8_blocks, block=(4, 6)), "x.weight", (9, 13), "FP8 4x6 blocks",
    ),
    "blocks of experts": ({"quantization_config": SMALL_BLOCKS}, fp8_small_blocks, "x", (3, 17, 13), "FP8 8x12 blocks"),
    "tensor": ({}, fp8_tensor, "x.weight", (5, 7), "FP8 per tensor"),
    "tensor [1]": ({}, reshaped(fp8_tensor, "weight_scale", (1,)), "x.weight", (5, 7), "FP8 per tensor"),
    "each expert": ({}, fp8_tensor, "x", (3, 5, 7), "FP8 per expert"),
    "each expert [E, 1, 1]": ({}, reshaped(fp8_tensor, "x_weight_scale", (3, 1, 1)), "x", (3, 5, 7), "FP8 per expert"),
    "channels": ({}, fp8_channel, "x.weight", (5, 7), "FP8 per channel"),
    "channels [out]": ({}, reshaped(fp8_channel, "weight_scale", (5,)), "x.weight", (5, 7), "FP8 per channel"),
    "channels of experts": ({}, fp8_channel, "x", (3, 5, 7), "FP8 per channel"),
    "nvfp4": ({}, nvfp4, "x.weight", (5, 48), "NVFP4"),
    "nvfp4 experts": ({}, nvfp4, "x", (3, 5, 32), "NVFP4"),
    "nvfp4 packed": ({}, nvfp4_packed, "x.weight", (5, 48), "NVFP4"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "maker", "name", "shape", "stored_as"), READ.values(), ids=READ)
def test_any_rows_read_as_the_values_they_stand_for(tmp_path, monkeypatch, config, maker, name, shape, stored_as):
    monkeypatch.setattr(checkpoints_convert.weight_folder, "_CHUNK", 11)
    tensors, values = made(maker, name, shape)
    with WeightFolder(write(tmp_path, config, tensors)) as files:
        assert {n: (i.shape, i.dtype) for n, i in files.tensors.items()} == {name: (shape, stored_as)}
        assert files.companions.keys() == tensors.keys() - {name, "x.weight_packed"}
        assert files.read(name).dtype == np.float32
        np.testing.assert_array_equal(files.read(name), values)
        stops = range(1, shape[0] + 1)
        cuts = [(start, stop) for stop in stops for start in range(stop)]
        for start, stop in cuts if len(cuts) < 500 else cuts[::97]:
            np.testing.assert_array_equal(files.read(name, start, stop), values[start:stop])


@pytest.mark.parametrize(
    ("config", "maker", "expected"),
    [
        ({"quantization_config": SMALL_BLOCKS}, fp8_small_blocks, {"x.weight": (7, 17), "x.weight_scale_inv": (0, 3)}),
        ({}, fp8_channel, {"x.weight": (7, 17), "x.weight_scale": (7, 17)}),
        ({}, nvfp4, {"x.weight": (7, 17), "x.weight_scale": (7, 17), "x.weight_scale_2": (0, None)}),
    ],
)
def test_only_the_rows_of_a_slice_are_read(tmp_path, monkeypatch, config, maker, expected):
    folder = write(tmp_path, config, made(maker, "x.weight", (40, 32)).tensors)
    read_rows, read = TensorFolder._read_rows, {}

    def noted(self, name, info, start, stop):
        read[name] = (start, stop)
        return read_rows(self, name, info, start, stop)

    monkeypatch.setattr(TensorFolder, "_read_rows", noted)
    with WeightFolder(folder) as files:
        files.read("x.weight", 7, 17)
    assert read == expected


# Widths that hold whole groups of 16, and rows that cut the small blocks.
WIDTHS = dict(hidden_size=32, linear_value_head_dim=16, moe_intermediate_size=16, shared_expert_intermediate_size=48)
CONFIG = config_of("moe", **WIDTHS)
ONE_BY_ONE = per_expert_names()


def quantized_pair(
    maker: Callable[[str], Maker | None], names: frozenset[str], config: dict[str, Any] = CONFIG
) -> tuple[Tensors, Tensors]:
    """The model's tensors with those that ``maker`` names quantized, and with their values in float32 instead."""
    quantized = random_tensors(config, names)
    plain, rng = dict(quantized), np.random.default_rng(1)
    for name, tensor in random_tensors(config, names).items():
        make = maker(name)
        if make is not None:
            tensors, plain[name] = make(rng, name, tensor.shape)
            del quantized[name]
            quantized |= tensors
    return quantized, plain


def is_projection(name: str) -> bool:
    return "_proj" in name and "conv" not in name


@pytest.mark.parametrize(
    ("kind", "names", "dtype"),
    [
        *((kind, ONE_BY_ONE, jnp.float32) for kind in MAKERS),
        *((kind, frozenset(), jnp.float32) for kind in MAKERS if kind != "nvfp4 packed"),
        ("nvfp4", ONE_BY_ONE, jnp.bfloat16),
    ],
)
def test_a_quantized_folder_converts_to_the_model_of_its_values(tmp_path, monkeypatch, kind, names, dtype):
    monkeypatch.setattr(checkpoints_convert.values, "PIECE_BYTES", 1200)
    quantized, plain = quantized_pair(lambda name: MAKERS[kind] if is_projection(name) else None, names)
    config = {**CONFIG, "quantization_config": SMALL_BLOCKS} if kind == "fp8 blocks" else CONFIG
    convert(write(tmp_path / "quantized", config, quantized, shards=2), tmp_path / "out", dtype=dtype)
    _, expected = load_hf(write(tmp_path / "plain", CONFIG, plain), dtype=dtype)
    assert_same_model(load_checkpoint(tmp_path / "out", dtype=dtype)[1], expected)


@pytest.mark.parametrize("kind", ["next", "nemotron", "llama"])
def test_other_families_convert_from_quantized_folders_too(tmp_path, kind):
    """Every matrix in blocks, the embedding and Qwen3-Next's fused projections among them."""
    config = {**CONFIGS[kind], "quantization_config": SMALL_BLOCKS}
    shapes = stored_shapes(config, ONE_BY_ONE)
    quantized, plain = quantized_pair(
        lambda name: fp8_small_blocks if len(shapes[name]) == 2 else None, ONE_BY_ONE, config
    )
    a = load_hf(write(tmp_path / "quantized", config, quantized), dtype=jnp.float32)[1]
    assert_same_model(a, load_hf(write(tmp_path / "plain", CONFIGS[kind], plain), dtype=jnp.float32)[1])


def mixed(name: str) -> Maker | None:
    """NVFP4 experts, FP8 elsewhere, embedding, head and draft head as they were: as releases mix them."""
    if name.startswith("mtp.") or not is_projection(name):
        return None
    return nvfp4 if ".experts." in name else fp8_channel if "self_attn" in name else fp8_tensor


def test_a_mixed_folder_converts_and_reports_what_it_leaves_out(tmp_path):
    quantized, plain = quantized_pair(mixed, ONE_BY_ONE)
    cache = [f"model.layers.3.self_attn.{n}_proj.{n}_scale" for n in "kv"]
    quantized |= dict.fromkeys(cache, np.array(1.5, np.float32))
    config = {**CONFIG, "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}
    report = convert(write(tmp_path / "quantized", config, quantized), tmp_path / "out")
    _, expected = load_hf(write(tmp_path / "plain", CONFIG, plain), dtype=jnp.bfloat16)
    assert_same_model(load_checkpoint(tmp_path / "out", dtype=jnp.bfloat16)[1], expected)
    inputs = {name for name in quantized if name.endswith("input_scale")}
    assert report.skipped == dict.fromkeys(inputs, "activation scale; only weights are read") | dict.fromkeys(
        cache, "scale of cached keys or values; only weights are read"
    )


def test_nemotron_converts_from_the_mix_it_is_released_in(tmp_path):
    """Experts in NVFP4, Mamba2 projections in FP8 with a scale a tensor, the rest and the draft head as they were."""
    config = config_of("nemotron", moe_latent_size=32, moe_intermediate_size=16)

    def kind(name: str) -> Maker | None:
        if name.startswith("mtp."):
            return None
        return (
            nvfp4
            if ".experts." in name
            else fp8_tensor
            if name.endswith(("in_proj.weight", "out_proj.weight"))
            else None
        )

    quantized, plain = quantized_pair(kind, frozenset(), config)
    cached = {
        f"backbone.layers.3.mixer.{name}.{name[0]}_scale": np.ones((), np.float32) for name in ("k_proj", "v_proj")
    }
    report = convert(write(tmp_path / "quantized", config, quantized | cached), tmp_path / "out", dtype=jnp.float32)
    expected = load_hf(write(tmp_path / "plain", config, plain), dtype=jnp.float32)[1]
    assert_same_model(load_checkpoint(tmp_path / "out", dtype=jnp.float32)[1], expected)
    assert cached.keys() <= report.skipped.keys()


def test_inspect_counts_values_and_names_their_formats(tmp_path):
    quantized, plain = quantized_pair(mixed, ONE_BY_ONE)
    summary = inspect(write(tmp_path / "quantized", CONFIG, quantized))
    counts = {"NVFP4": 0, "FP8 per channel": 0, "FP8 per tensor": 0}
    named = {"nvfp4": "NVFP4", "fp8_channel": "FP8 per channel", "fp8_tensor": "FP8 per tensor"}
    for name in plain:
        make = mixed(name)
        if make is not None:
            counts[named[make.__name__]] += plain[name].size
    assert {n: summary["stored_values"][n] for n in counts} == counts
    assert sum(summary["stored_values"].values()) == summary["parameters"]["total"]
    assert summary["problems"] == []
    assert summary["dtype"] == "bfloat16"


def test_scales_of_a_weight_that_is_left_out_go_with_it(tmp_path):
    quantized, _ = quantized_pair(lambda name: nvfp4 if ".experts." in name else None, ONE_BY_ONE)
    report = convert(write(tmp_path / "quantized", CONFIG, quantized), tmp_path / "out", no_mtp=True)
    left_out = {name for name in report.skipped if name.startswith("mtp.")}
    assert left_out == {name for name in quantized if name.startswith("mtp.")}
    assert {report.skipped[name] for name in left_out} == {"draft head, left out by --no-mtp"}


DENSE = config_of("dense", hidden_size=32)
NAME = "model.layers.1.mlp.up_proj.weight"
STEM = NAME.removesuffix("weight")
SHAPE = (40, 32)


def damaged(tensors: Tensors, name: str, index: int, value: float) -> Tensors:
    flat = tensors[name].reshape(-1).copy()
    flat[index] = value
    return {**tensors, name: flat.reshape(tensors[name].shape)}


def without(tensors: Tensors, suffix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(suffix)}


FP8_WEIGHT, NVFP4_WEIGHT, PACKED_WEIGHT = (made(m, NAME, SHAPE).tensors for m in (fp8_channel, nvfp4, nvfp4_packed))
PLAIN_WEIGHT = {NAME: np.ones(SHAPE, ml_dtypes.bfloat16)}
NOT_FINITE = "(for blocks.3.mixer.up_proj.kernel) holds NaN or infinite values"
FP8_ONLY = {"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
E5M2 = {**FP8_WEIGHT, NAME: np.ones(SHAPE, ml_dtypes.float8_e5m2)}


@pytest.mark.parametrize(
    ("tensors", "quantization", "said"),
    [
        (without(FP8_WEIGHT, "scale"), {}, f"{NAME} has dtype F8_E4M3 but no scale: missing tensor {NAME}_scale_inv"),
        (without(NVFP4_WEIGHT, "scale_2"), {}, f"missing tensor {NAME}_scale_2, the scale of {NAME}"),
        (without(NVFP4_WEIGHT, "weight_scale"), {}, f"missing tensor {NAME}_scale, the scale of {NAME}"),
        (without(PACKED_WEIGHT, "weight_global_scale"), {}, f"missing tensor {STEM}weight_global_scale, the scale of"),
        ({NAME: NVFP4_WEIGHT[NAME]}, {}, f"tensor {NAME} has dtype U8 but no scales: missing tensor {NAME}_scale and"),
        ({**FP8_WEIGHT, f"{NAME}_scale": np.ones((32, 1), np.float32)}, {},
         f"tensor {NAME}_scale has shape [32, 1], no scale of {NAME} [40, 32]; known: [1, 1] per tensor, [40, 1] per"),
        ({**NVFP4_WEIGHT, f"{NAME}_scale": NVFP4_WEIGHT[f"{NAME}_scale"][:-1].copy()}, {},
         f"tensor {NAME}_scale has shape [39, 2], no scale of {NAME} [40, 32]; known: [40, 2]"),
        ({**NVFP4_WEIGHT, f"{NAME}_scale_2": np.ones(40, np.float32)}, {}, f"tensor {NAME}_scale_2 has shape [40]"),
        ({**FP8_WEIGHT, f"{NAME}_scale": np.ones((40, 1), np.uint8)}, {},
         f"tensor {NAME}_scale, the scale of {NAME}, has dtype U8; only F32, BF16, F16 convert"),
        ({**NVFP4_WEIGHT, f"{NAME}_scale": np.ones((40, 2), np.float32)}, {},
         f"tensor {NAME}_scale, the scale of {NAME}, has dtype F32; only F8_E4M3 convert"),
        (E5M2, {}, f"tensor {NAME} has dtype F8_E5M2"),
        ({**FP8_WEIGHT, NAME: np.ones(SHAPE, np.int8)}, {}, f"tensor {NAME} has dtype I8"),
        ({**PACKED_WEIGHT, f"{STEM}weight_packed": np.ones((40, 4), np.int32)}, {},
         f"tensor {STEM}weight_packed has dtype I32 and shape [40, 4]; only U8 convert"),
        (NVFP4_WEIGHT, FP8_ONLY, f"tensor {NAME} has dtype U8, but quantization_config in config.json declares float8"),
        ({**NVFP4_WEIGHT, NAME: NVFP4_WEIGHT[NAME][:, :-1].copy()}, {}, f"tensor {NAME} holds 30 values a row"),
        (made(fp8_tensor, NAME, (40, 31)).tensors, {}, f"tensor {NAME} has shape [40, 31], expected [40, 32]"),
        (made(nvfp4, NAME, (40, 64)).tensors, {}, f"tensor {NAME} has shape [40, 64], expected [40, 32]"),
        ({**PLAIN_WEIGHT, f"{NAME}_scale": np.ones((), np.float32)}, {}, f"unknown tensor {NAME}_scale []"),
        ({**PLAIN_WEIGHT, f"{STEM}input_scale": np.ones((), np.float32)}, {}, f"unknown tensor {STEM}input_scale []"),
        ({**PLAIN_WEIGHT, f"{STEM}weight_packed": NVFP4_WEIGHT[NAME]}, {}, f"unknown tensor {STEM}weight_packed"),
        ({**FP8_WEIGHT, f"{NAME}_scale_2": np.ones((), np.float32)}, {}, f"unknown tensor {NAME}_scale_2 []"),
        ({**FP8_WEIGHT, f"{STEM}pre_quant_scale": np.ones(32, np.float32)}, {}, "unknown tensor"),
        (damaged(FP8_WEIGHT, NAME, 77, np.nan), {}, f"{NAME} {NOT_FINITE}"),
        (damaged(FP8_WEIGHT, f"{NAME}_scale", 9, np.nan), {}, f"  {NAME}_scale {NOT_FINITE}"),
        (damaged(FP8_WEIGHT, f"{NAME}_scale", 9, np.inf), {}, f"  {NAME}_scale {NOT_FINITE}"),
        (damaged(NVFP4_WEIGHT, f"{NAME}_scale", 5, np.nan), {}, f"  {NAME}_scale {NOT_FINITE}"),
        (damaged(NVFP4_WEIGHT, f"{NAME}_scale_2", 0, -np.inf), {}, f"  {NAME}_scale_2 {NOT_FINITE}"),
        (damaged(PACKED_WEIGHT, f"{STEM}weight_global_scale", 0, 0.0), {},
         f"  {STEM}weight_global_scale (for blocks.3.mixer.up_proj.kernel) holds a zero, by which it would divide"),
        ({**FP8_WEIGHT, f"{NAME}_scale": np.full((40, 1), 3e38, np.float32)}, {}, f"  {NAME} {NOT_FINITE}"),
    ],
)  # fmt: skip
def test_a_quantized_weight_that_cannot_be_read_is_one_line(tmp_path, tensors, quantization, said):
    rest = random_tensors(DENSE)
    del rest[NAME]
    config = {**DENSE, "quantization_config": quantization}
    message = refusal(write(tmp_path / "hf", config, rest | tensors))
    assert said in message
    assert "(1 problem)" in message


def test_all_problems_of_quantized_weights_are_listed_together(tmp_path):
    tensors = random_tensors(DENSE)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
    for name in names:
        del tensors[name]
        tensors |= without(made(nvfp4, name, SHAPE).tensors, "scale_2")
    tensors[f"{names[0]}_scale"] = tensors[f"{names[0]}_scale"][1:].copy()
    folder = write(tmp_path / "hf", DENSE, tensors)
    assert "(5 problems)" in refusal(folder)
    assert len(inspect(folder)["problems"]) == 5


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ("gptq", "quant_method='gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "block size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "block size [128, 0]"),
        ({"quant_method": "modelopt", "config_groups": {"a": 4}}, "a=4 must be an object"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
    ],
)
def test_a_quantization_that_is_not_read_is_refused_by_name(tmp_path, section, said):
    folder = write(tmp_path / "hf", {**DENSE, "quantization_config": section}, random_tensors(DENSE))
    message = refusal(folder)
    assert said in message
    assert "\n" not in message


_JSON = st.recursive(
    st.none() | st.integers(-3, 70) | st.floats(-10, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_FIELDS = ("weight_block_size", "config_groups", "quantized_layers", "quant_algo", "transform_config")


@given(method=st.sampled_from(METHODS), section=st.dictionaries(st.sampled_from(_FIELDS), _JSON))
def test_any_quantization_section_is_understood_or_refused(method, section):
    config = json.loads(json.dumps({"quantization_config": {"quant_method": method, **section}}))
    with contextlib.suppress(UserError):
        read_quantization(config)
