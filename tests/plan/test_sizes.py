"""Counts from a description equal the counts of the model that the description builds."""

import dataclasses
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import jax.numpy as jnp
import pytest

from tests.tiny import CONFIGS
from wmtp_jax.config import ModelConfig
from wmtp_jax.models.decoder import abstract
from wmtp_jax.models.parameters import named_parameters
from wmtp_jax.plan.memory import position_bytes, weight_bytes
from wmtp_jax.plan.sizes import ModelSizes, sizes_of_config
from wmtp_jax.plan.source import read_sizes
from wmtp_jax.presets import model_config, preset_names, read_preset

EXPERTS = ("mixer.gate_up_proj", "mixer.up_proj", "mixer.down_proj")
RECURRENT = ("in_proj_qkv.kernel", "in_proj_z.kernel", "mixer.in_proj.kernel", "out_proj.kernel")
PUBLISHED_LAYERS = {"qwen3_6_35b": (10, 1), "qwen3_5_122b": (12, 1), "nemotron_3_super": (8, 1)}


def leaves(config: ModelConfig, dtype: Any) -> Mapping[str, Any]:
    return named_parameters(abstract(config, dtype))


def elements(tree: Mapping[str, Any], *, draft: bool) -> int:
    return sum(leaf.size for name, leaf in tree.items() if name.startswith("mtp.") == draft)


def nbytes(tree: Mapping[str, Any], *, draft: bool) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for name, leaf in tree.items() if name.startswith("mtp.") == draft)


@pytest.mark.parametrize("name", [*CONFIGS, *preset_names()])
def test_parameters_and_bytes_are_those_of_the_built_tree(name: str) -> None:
    config = CONFIGS[name] if name in CONFIGS else model_config(read_preset(name), name)
    sizes = sizes_of_config(config)
    tree = leaves(config, jnp.bfloat16)
    for draft, part in ((False, sizes.target), (True, sizes.draft)):
        assert part.total == elements(tree, draft=draft)
        assert weight_bytes(sizes, "bf16", draft=draft) == nbytes(tree, draft=draft)
        assert weight_bytes(sizes, "float32", draft=draft) == 4 * part.total


@pytest.mark.parametrize("name", ["experts", "mamba", "qwen3_6_35b", "nemotron_3_super"])
def test_experts_and_recurrent_projections_are_counted_as_such(name: str) -> None:
    config = CONFIGS[name] if name in CONFIGS else model_config(read_preset(name), name)
    sizes, tree = sizes_of_config(config), leaves(config, jnp.bfloat16)
    experts = {key: leaf for key, leaf in tree.items() if key.endswith(EXPERTS)}
    recurrent = [key for key in tree if key.endswith(RECURRENT)]
    assert sizes.target.experts == elements(experts, draft=False)
    assert sizes.draft.experts == elements(experts, draft=True)
    assert sizes.target.recurrent == sum(tree[key].size for key in recurrent)


@pytest.mark.parametrize(
    ("name", "target", "draft", "active"),
    [
        ("qwen3_6_35b", 34.66e9, 0.845e9, 2.95e9),
        ("qwen3_5_122b", 122.11e9, 2.524e9, 9.01e9),
        ("nemotron_3_super", 120.67e9, 2.942e9, 12.23e9),
    ],
)
def test_published_models_are_as_large_as_their_names_say(
    name: str, target: float, draft: float, active: float
) -> None:
    sizes = read_sizes(name)
    assert sizes.target.total == pytest.approx(target, rel=2e-3)
    assert sizes.draft.total == pytest.approx(draft, rel=2e-3)
    assert sizes.active == pytest.approx(active, rel=2e-3)


def test_nvfp4_bytes_are_those_of_the_published_checkpoint() -> None:
    sizes = read_sizes("nemotron_3_super")
    planned = sum(weight_bytes(sizes, "nvfp4", draft=draft) for draft in (False, True))
    assert planned == pytest.approx(80_297_329_824, rel=0.01)


@pytest.mark.parametrize(
    ("name", "layers"),
    [*PUBLISHED_LAYERS.items(), ("proxy_35b", (10, 1)), ("proxy_122b", (12, 1)), ("proxy_8_1", (8, 1))],
)
@pytest.mark.parametrize("cache", ["bf16", "int8", "fp8", "float32"])
def test_draft_share_is_one_layer_in_all_of_them(name: str, layers: tuple[int, int], cache: str) -> None:
    sizes = read_sizes(name)
    assert (sizes.attention_layers, sizes.draft_layers) == layers
    entry = position_bytes(sizes, cache)
    target, draft = sizes.attention_layers * entry, sizes.draft_layers * entry
    assert draft * (layers[0] + 1) == target + draft


def test_caches_of_the_published_models_at_a_million_tokens() -> None:
    gib = {name: 2**20 * position_bytes(read_sizes(name), "bf16") / 2**30 for name in PUBLISHED_LAYERS}
    assert gib == {"qwen3_6_35b": 2.0, "qwen3_5_122b": 2.0, "nemotron_3_super": 1.0}


def test_the_proxy_of_the_35b_has_its_pattern_and_132_million_parameters() -> None:
    config = model_config(read_preset("proxy_35b"), "proxy_35b")
    mixers = config.blocks[::2]
    assert len(mixers) == 40
    assert [index for index, mixer in enumerate(mixers) if mixer == "attention"] == list(range(3, 40, 4))
    assert sizes_of_config(config).target.total == pytest.approx(132e6, rel=5e-3)


def test_the_proxy_of_nemotron_has_its_blocks_with_dense_feed_forwards() -> None:
    real, proxy = (model_config(read_preset(name), name) for name in ("nemotron_3_super", "proxy_8_1"))
    assert proxy.blocks == tuple("dense" if kind == "moe" else kind for kind in real.blocks)
    assert (real.count("mamba"), real.count("moe"), real.count("attention")) == (40, 40, 8)


def test_rope_false_is_attention_without_positions() -> None:
    assert model_config(read_preset("proxy_8_1"), "proxy_8_1").attention.rope is None
    assert model_config(read_preset("proxy_35b"), "proxy_35b").attention.rope is not None


def test_full_size_models_stretch_their_rotary_positions_by_four() -> None:
    for name in ("qwen3_6_35b", "qwen3_5_122b"):
        config = model_config(read_preset(name), name)
        assert config.attention.rope is not None
        scaling = config.attention.rope.scaling
        assert scaling is not None
        assert (scaling.kind, scaling.factor * scaling.original_max_positions) == ("yarn", config.max_positions)


def test_expected_experts_equal_their_enumeration() -> None:
    """All choices of k = 2 of E = 5 experts by 3 independent tokens, counted."""
    choices = list(combinations(range(5), 2))
    seen = [len(set().union(*tokens)) for tokens in product(choices, repeat=3)]
    sizes = sizes_of_config(CONFIGS["experts"])
    assert (sizes.num_experts, sizes.top_k) == (5, 2)
    assert sizes.experts_read(3) == pytest.approx(sum(seen) / len(seen) / 5, rel=1e-12)


def test_a_model_without_a_head_has_no_draft() -> None:
    sizes = sizes_of_config(dataclasses.replace(CONFIGS["hybrid"], mtp_pattern=()))
    assert isinstance(sizes, ModelSizes)
    assert (sizes.draft.total, sizes.draft_layers, sizes.extend_parameters) == (0, 0, 0)
