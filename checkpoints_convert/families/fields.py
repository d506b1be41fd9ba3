"""Reads fields of a Hugging Face config.json, and refuses by name what the models here do not compute."""

from typing import Any, Literal

from checkpoints_convert.quantization_config import read_quantization
from wmtp_jax.config import AttentionConfig, ConfigError, RopeConfig, RopeScaling

_REQUIRED: Any = object()
_ROPE_KINDS: dict[str, Literal["linear", "llama3", "yarn"]] = {"linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Frequencies unchanged: "mrope" adds positions of images, which text does not have.
_PLAIN_ROPE = (None, "default", "mrope")
_OPTIONAL_YARN = ("attention_factor", "mscale", "mscale_all_dim")


class Fields:
    """The text model's fields, nested under ``text_config`` or flat, with types checked where they are read."""

    def __init__(self, hf: dict[str, Any]):
        nested = hf.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise ConfigError(f"config.json: text_config is {nested!r}, not an object")
        self.top = hf
        self.text: dict[str, Any] = hf if nested is None else nested

    def get(self, name: str, default: Any = None) -> Any:
        """A field; null counts as absent."""
        value = self.text.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        """A positive whole number."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.json: {name}={value!r} must be a positive whole number")
        return value

    def count(self, name: str) -> int:
        """A whole number that may be zero or absent."""
        return 0 if self.get(name, 0) == 0 else self.integer(name)

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A number."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json: {name}={value!r} must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name}={value!r} must be true or false")
        return value

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise ConfigError(f"config.json: {name} is missing")
        return value

    def tie_embeddings(self) -> bool:
        """Whether the output head is the embedding. The outermost level that says so decides, as in transformers."""
        outer = self.top.get("tie_word_embeddings")
        return bool(outer) if isinstance(outer, bool) else self.flag("tie_word_embeddings", False)

    def eos_ids(self) -> tuple[int, ...]:
        """End-of-text ids, from an int or a list, at either level."""
        value = self.get("eos_token_id", self.top.get("eos_token_id"))
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"config.json: eos_token_id={value!r} must be an id or a list of ids")
        return tuple(ids)


def refuse_unsupported(fields: Fields) -> None:
    """Names what a config asks for that no model here computes."""
    read_quantization(fields.top)
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is")
    if fields.flag("use_sliding_window", False) and _window_in_use(fields):
        raise ConfigError("config.json: use_sliding_window=true is not supported; attention here sees all positions")
    if fields.get("logit_scale", 1) not in (1, 1.0) or fields.get("final_logit_softcapping"):
        raise ConfigError("config.json: logit_scale and final_logit_softcapping are not supported")


def refuse_sliding_window(fields: Fields) -> None:
    """For families where a window that is present is a window in use."""
    window = fields.get("sliding_window")
    if window is not None:
        raise ConfigError(f"config.json: sliding_window={window} is not supported; attention here sees all positions")


def _window_in_use(fields: Fields) -> bool:
    first = fields.get("max_window_layers", 28)
    return fields.get("sliding_window") is not None and first < fields.integer("num_hidden_layers")


def layer_types(fields: Fields, allowed: tuple[str, ...], default: list[str]) -> list[str]:
    """The mixer of every layer. Raises ConfigError for kinds outside ``allowed`` and for a wrong count."""
    kinds, layers = fields.get("layer_types", default), fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"config.json: layer_types must list {layers} layers, as num_hidden_layers says")
    for index, kind in enumerate(kinds):
        if kind not in allowed:
            raise ConfigError(f"config.json: layer_types[{index}]={kind!r} is not supported here; known: {allowed}")
    return kinds


def attention_config(
    fields: Fields,
    *,
    head_dim: int,
    rotary_share: float,
    output_gate: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> AttentionConfig:
    """Heads and rotary positions; ``rotary_share`` is the family's default ``partial_rotary_factor``."""
    heads = fields.integer("num_attention_heads")
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope_config(fields, head_dim, rotary_share),
        output_gate=output_gate,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def rope_config(fields: Fields, head_dim: int, rotary_share: float) -> RopeConfig:
    """Rotary positions from ``rope_parameters`` (newer) or ``rope_scaling`` with ``rope_theta`` beside it (older)."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(f"config.json: rope_parameters={rope!r} must be one flat object for all layers")
    merged = Fields({**fields.text, **{k: v for k, v in rope.items() if v is not None}, "text_config": None})
    share = merged.number("partial_rotary_factor", rotary_share)
    return RopeConfig(
        theta=merged.number("rope_theta", 10000.0),
        rotary_dim=int(head_dim * share),
        scaling=_rope_scaling(merged, rope),
    )


def _rope_scaling(fields: Fields, rope: dict[str, Any]) -> RopeScaling | None:
    name = rope.get("rope_type", rope.get("type"))
    if name in _PLAIN_ROPE:
        return None
    kind = _ROPE_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"config.json: rope_type={name!r} is not supported; known: default, linear, llama3, yarn")
    trained = (
        0
        if kind == "linear"
        else fields.integer("original_max_position_embeddings", fields.get("max_position_embeddings", _REQUIRED))
    )
    optional = {name: fields.number(name) for name in _OPTIONAL_YARN if fields.get(name) is not None}
    ramps = {"beta_fast": 32.0, "beta_slow": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return RopeScaling(
        kind=kind,
        factor=_factor(fields, trained),
        original_max_positions=trained,
        truncate=fields.flag("truncate", True),
        **{name: fields.number(name, default) for name, default in ramps.items()},
        **optional,
    )


def _factor(fields: Fields, trained: int) -> float:
    if fields.get("factor") is None and trained:
        return fields.integer("max_position_embeddings") / trained
    return fields.number("factor")
