"""What a model is made of: frozen, keyword-only descriptions, independent of any checkpoint format.

A decoder is a flat sequence of residual blocks, ``x + mixer(norm(x))``. A Qwen "layer" is two blocks (a token mixer,
then an MLP); a Nemotron layer is one. ``pattern`` names the blocks of one period; the decoder repeats the period
``num_periods`` times and scans over the repetitions, so compile time follows the period and not the depth. Orders that
are no repeated period, as Nemotron-3's, go on with ``more_segments`` of the same kind.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from wmtp_jax.errors import UserError

BlockKind = Literal["attention", "delta", "mamba", "dense", "moe"]
RECURRENT_KINDS: tuple[BlockKind, ...] = ("delta", "mamba")


# Far past any model, and small enough that products of two sizes stay exact.
_LARGEST = 2**40


class ConfigError(UserError):
    """A model description that cannot be built; the message names the field and the mend."""


class _Checked:
    """A description whose fields have the types that it declares, and numbers that a model can have."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
            if value is None and type(None) in kinds:
                continue
            # A number may be 0 only where that switches something off: by default, or in place of None.
            zero = field.default == 0 or (float in kinds and value == 0 and type(None) in kinds)
            if int in kinds and not _in_range(value, int, 0 if zero else 1):
                raise ConfigError(f"{field.name} = {value!r} must be a whole number from {int(not zero)} to {_LARGEST}")
            if float in kinds and not (_in_range(value, int | float, 0 if zero else 5e-324)):
                raise ConfigError(f"{field.name} = {value!r} must be a number above 0, {_LARGEST} at most")
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                raise ConfigError(f"{field.name} = {value!r} must be one of {', '.join(get_args(field.type))}")
            if bool in kinds and not isinstance(value, bool):
                raise ConfigError(f"{field.name} = {value!r} must be true or false")


def _in_range(value: Any, kind: Any, least: float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= _LARGEST


@dataclass(frozen=True, kw_only=True)
class RopeScaling(_Checked):
    """Frequency scaling beyond the trained context.

    ``kind`` is ``linear``, ``llama3`` or ``yarn`` (arXiv 2309.00071); each reads its own fields, as in Hugging Face's
    ``rope_parameters``.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class RopeConfig(_Checked):
    """Rotary positions on the first ``rotary_dim`` of each head's dimensions (rotate-half pairs)."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Checked):
    """Grouped-query softmax attention. ``rope=None`` is position-free attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    output_gate: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}"
            )
        if self.rope and (self.rope.rotary_dim % 2 or self.rope.rotary_dim > self.head_dim):
            raise ConfigError(f"rotary_dim={self.rope.rotary_dim} must be even and at most head_dim={self.head_dim}")


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(_Checked):
    """Gated delta rule with a short causal convolution (Gated DeltaNet, arXiv 2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_key_heads={self.num_key_heads} does not divide "
                f"linear_num_value_heads={self.num_value_heads}"
            )

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: all query, key and value heads side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class MambaConfig(_Checked):
    """Mamba2 (arXiv 2405.21060) with a short causal convolution; groups of heads share B and C.

    ``min_step`` bounds the step size dt from below; 0 leaves it as it is.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    min_step: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_groups:
            raise ConfigError(f"n_groups={self.num_groups} does not divide mamba_num_heads={self.num_heads}")

    @property
    def inner_size(self) -> int:
        """Channels of all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: all heads' inputs, then B and C of every group."""
        return self.inner_size + 2 * self.num_groups * self.state_size


Activation = Literal["swiglu", "relu2"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig(_Checked):
    """Feed-forward: ``down(silu(gate(x)) * up(x))`` (swiglu) or ``down(relu(up(x))^2)`` (relu2)."""

    ffn_size: int
    bias: bool = False
    activation: Activation = "swiglu"


@dataclass(frozen=True, kw_only=True)
class MoEConfig(_Checked):
    """Top-k experts and an optional shared expert (``shared_ffn_size=0``: none).

    The ``sigmoid`` router scores every expert by itself, chooses by score plus a learned correction, and weighs by
    score alone. Routed experts work on a projection to ``latent_size`` (0: on the stream itself). ``shared_gate``: the
    shared expert stands behind a sigmoid gate.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    shared_ffn_size: int = 0
    normalize_top_k: bool = True
    router: Literal["softmax", "sigmoid"] = "softmax"
    activation: Activation = "swiglu"
    latent_size: int = 0
    routed_scaling: float = 1.0
    shared_gate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_k <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok={self.top_k} must be in 1..num_experts={self.num_experts}")


@dataclass(frozen=True, kw_only=True)
class Segment(_Checked):
    """Consecutive blocks: a period and how often it is repeated."""

    pattern: tuple[BlockKind, ...]
    num_periods: int

    @property
    def blocks(self) -> tuple[BlockKind, ...]:
        """Every block in order."""
        return self.pattern * self.num_periods


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Checked):
    """A hybrid decoder and, where ``mtp_pattern`` is not empty, its Multi-Token-Prediction draft head."""

    vocab_size: int
    hidden_size: int
    pattern: tuple[BlockKind, ...]
    num_periods: int
    more_segments: tuple[Segment, ...] = ()
    attention: AttentionConfig
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    dense: DenseConfig | None = None
    moe: MoEConfig | None = None
    norm_eps: float = 1e-6
    zero_centered_norm: bool = False
    tie_embeddings: bool = False
    mtp_pattern: tuple[BlockKind, ...] = ()
    max_positions: int = 32768
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(segment.pattern for segment in self.segments):
            raise ConfigError("pattern = [] must name at least one block")
        if not all(_in_range(token, int, 0) for token in self.eos_ids):
            raise ConfigError(f"eos_ids = {list(self.eos_ids)} must be token ids")
        for kind in {kind for segment in self.segments for kind in segment.pattern} | set(self.mtp_pattern):
            if kind != "attention" and getattr(self, kind, None) is None:
                raise ConfigError(f"pattern has a {kind!r} block but the config has no {kind!r} section")
        # Draft keys must not depend on draft attention: prefill then skips the entries that no draft will read.
        if self.mtp_pattern and (self.mtp_pattern[0] != "attention" or set(self.mtp_pattern[1:]) - {"dense", "moe"}):
            raise ConfigError(f"mtp_pattern={self.mtp_pattern} must be one attention block, then feed-forward blocks")

    @property
    def has_mtp(self) -> bool:
        return bool(self.mtp_pattern)

    @property
    def blocks(self) -> tuple[BlockKind, ...]:
        """Every block of the decoder in order."""
        return tuple(kind for segment in self.segments for kind in segment.blocks)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The decoder as runs of equal periods; most models are one."""
        return (Segment(pattern=self.pattern, num_periods=self.num_periods), *self.more_segments)

    def count(self, kind: BlockKind) -> int:
        """How many blocks of one kind the decoder has, the draft head left out."""
        return sum(segment.pattern.count(kind) * segment.num_periods for segment in self.segments)


def fold_pattern(blocks: Sequence[BlockKind], per_layer: int) -> tuple[tuple[BlockKind, ...], int]:
    """The shortest period, in whole layers of ``per_layer`` blocks, that tiles ``blocks``, and its repetitions."""
    for size in range(per_layer, len(blocks) + 1, per_layer):
        repeats, rest = divmod(len(blocks), size)
        if not rest and tuple(blocks[:size]) * repeats == tuple(blocks):
            return tuple(blocks[:size]), repeats
    raise ConfigError("a model needs at least one layer")


def fold_segments(blocks: Sequence[BlockKind]) -> tuple[Segment, ...]:
    """Segments that hold ``blocks`` in order, with the fewest programs to compile: a block each, and a scan each."""
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())]
    for end in range(1, len(blocks) + 1):
        ways = []
        for begin, (cost, before) in enumerate(best):
            pattern, repeats = fold_pattern(blocks[begin:end], per_layer=1)
            ways.append((cost + len(pattern) + 1, (*before, Segment(pattern=pattern, num_periods=repeats))))
        best.append(min(ways, key=lambda way: way[0]))
    return best[-1][1]


_SECTIONS = {
    "attention": AttentionConfig,
    "delta": DeltaConfig,
    "mamba": MambaConfig,
    "dense": DenseConfig,
    "moe": MoEConfig,
}


def config_to_json(config: ModelConfig) -> str:
    """The description as JSON text; ``config_from_json`` reads it back equal."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def config_from_json(text: str) -> ModelConfig:
    """Reads ``config_to_json`` output, or TOML fields, in which ``rope`` is false for none.

    Raises ConfigError for unknown or missing fields.
    """
    try:
        fields: dict[str, Any] = json.loads(text)
        for name, section in _SECTIONS.items():
            if fields.get(name) is not None:
                fields[name] = _section(section, fields[name])
        for name in ("pattern", "mtp_pattern", "eos_ids"):
            fields[name] = tuple(fields[name])
        fields["more_segments"] = tuple(
            Segment(**{**segment, "pattern": tuple(segment["pattern"])}) for segment in fields.get("more_segments", ())
        )
        return ModelConfig(**fields)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a model description: {error}") from None


def _section(section: type, fields: dict[str, Any]) -> Any:
    if section is AttentionConfig and fields.get("rope") is False:
        # TOML has no null.
        fields = {**fields, "rope": None}
    if section is AttentionConfig and fields.get("rope"):
        rope = dict(fields["rope"])
        if rope.get("scaling"):
            rope["scaling"] = RopeScaling(**rope["scaling"])
        fields = {**fields, "rope": RopeConfig(**rope)}
    return section(**fields)


def read_config(path: Path) -> ModelConfig:
    """Reads the description that a converted checkpoint carries."""
    return config_from_json(path.read_text())
