"""Descriptions with other than a model's values: one line that names the field, whichever command reads them."""

import tomllib
from pathlib import Path

import pytest

from wmtp_jax.cli.main import run
from wmtp_jax.config import ConfigError
from wmtp_jax.errors import UserError
from wmtp_jax.presets import model_config, preset_names, read_preset

PRESET = Path(__file__).parents[1] / "bench" / "preset.toml"
VALUES = {
    "text": "x",
    "list": [],
    "nan": float("nan"),
    "infinity": float("inf"),
    "negative": -1,
    "a half": 0.5,
    "huge": 10**30,
    "true": True,
}
MAMBA = {"num_heads": 4, "head_dim": 8, "state_size": 8, "num_groups": 2}
SIZES = ["vocab_size", "hidden_size", "num_periods", "max_positions"]
SECTIONS = {"attention": ["num_heads", "num_kv_heads", "head_dim"], "delta": ["key_dim"], "dense": ["ffn_size"]}
WHERE = [(None, size) for size in SIZES] + [(section, size) for section, names in SECTIONS.items() for size in names]


def described() -> dict:
    return tomllib.loads(PRESET.read_text())


@pytest.mark.parametrize("kind", [*VALUES, "zero"])
@pytest.mark.parametrize(("section", "size"), WHERE)
def test_a_size_that_no_model_has_is_refused_by_name(section, size, kind):
    preset = described()
    (preset["model"][section] if section else preset["model"])[size] = VALUES.get(kind, 0)
    with pytest.raises(ConfigError, match=rf"{size} = .* must be a whole number"):
        model_config(preset, "it")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("norm_eps", "x", "norm_eps = 'x' must be a number above 0"),
        ("norm_eps", float("nan"), "norm_eps = nan"),
        ("tie_embeddings", "x", "tie_embeddings = 'x' must be true or false"),
        ("pattern", [], "pattern = .* at least one block"),
        ("eos_ids", "x", "eos_ids = .* must be token ids"),
        ("eos_ids", [-1], "eos_ids = .* must be token ids"),
        ("attention", 3, "not a model description"),
        ("dense", {"ffn_size": 8, "activation": "gelu"}, "activation = 'gelu' must be one of swiglu, relu2"),
        ("dense", {"ffn_size": 8, "activation": ["relu2"]}, "activation = .* must be one of"),
        ("mamba", MAMBA | {"min_step": "0.001"}, "min_step = '0.001' must be a number"),
        ("mamba", MAMBA | {"min_step": -1.0}, "min_step = -1.0 must be a number"),
        ("mamba", MAMBA | {"min_step": float("nan")}, "min_step = nan must be a number"),
        ("mamba", MAMBA | {"num_groups": 3}, "n_groups=3 does not divide"),
        ("more_segments", 3, "not a model description"),
        ("more_segments", [3], "not a model description"),
        ("more_segments", [{"pattern": ["dense"]}], "num_periods"),
        ("more_segments", [{"pattern": [], "num_periods": 1}], "at least one block"),
        ("more_segments", [{"pattern": ["mamba"], "num_periods": 1}], "'mamba' block but the config has no 'mamba'"),
        ("more_segments", [{"pattern": ["dense"], "num_periods": 0}], "num_periods = 0"),
        ("unknown", 3, "unknown"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_other_fields_are_refused_by_name(field, value, said):
    preset = described()
    preset["model"][field] = value
    with pytest.raises(UserError, match=said):
        model_config(preset, "it")


def test_a_date_is_refused(tmp_path, capfd):
    path = tmp_path / "dated.toml"
    path.write_text(PRESET.read_text().replace("vocab_size = 97", "vocab_size = 1979-05-27"))
    assert run(["plan", "--model", str(path), "--hardware", "cpu"]) == 2
    error = capfd.readouterr().err
    assert "[model] section" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in preset_names() if "model" in read_preset(name)])
def test_every_preset_that_ships_is_a_model(name):
    assert model_config(read_preset(name), name).hidden_size > 0
