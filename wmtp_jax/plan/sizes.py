"""How large a model is, counted from its description: nothing is built, and JAX is not loaded."""

from dataclasses import dataclass
from typing import NamedTuple

from wmtp_jax.config import Activation, AttentionConfig, BlockKind, DeltaConfig, ModelConfig


class Weights(NamedTuple):
    """Parameters, or something about them, by how they are stored and read.

    - ``embedding``: looked up, not read as a whole, except where it is the output head too.
    - ``head``: the output head; 0 where it is tied to the embedding, or is another part's.
    - ``experts``: routed; a forward reads those that its tokens choose.
    - ``projections``: of attention, dense feed-forwards, shared experts and the draft head's input.
    - ``recurrent``: projections of recurrent layers.
    - ``small``: norms, routers, convolutions, biases, gates; ``float32``: kept in float32 whatever the others are.
    """

    embedding: float = 0
    head: float = 0
    experts: float = 0
    projections: float = 0
    recurrent: float = 0
    small: float = 0
    float32: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    def dot(self, other: "Weights") -> float:
        """The sum of the products, kind by kind."""
        return sum(a * b for a, b in zip(self, other, strict=True))

    def plus(self, other: "Weights", times: int = 1) -> "Weights":
        """The sum, ``other`` counted ``times``."""
        return Weights(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What planning knows of a model. ``draft`` is empty and ``draft_layers`` 0 without an MTP head.

    ``state_elements`` (float32) and ``tail_elements`` are a row's recurrent memory; ``extend_parameters`` make a draft
    entry's keys and values; ``nvfp4_recurrent_bytes`` is what the published NVFP4 checkpoint stores a recurrent
    projection's parameter in.
    """

    target: Weights
    draft: Weights
    attention_layers: int
    draft_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    state_elements: int
    tail_elements: int
    extend_parameters: int
    max_positions: int
    nvfp4_recurrent_bytes: float = 2.0

    @property
    def output_head(self) -> float:
        """Parameters of the output head, wherever they are stored."""
        return self.target.head or self.target.embedding

    @property
    def active(self) -> float:
        """Parameters that one token of plain decoding is multiplied by, the output head with them."""
        return self.read(self.target, 1).total

    def read(self, part: Weights, tokens: float) -> Weights:
        """Parameters that a forward of ``tokens`` tokens is expected to read once, the output head with them."""
        return part._replace(embedding=0, head=self.output_head, experts=part.experts * self.experts_read(tokens))

    def experts_read(self, tokens: float) -> float:
        """The share of E experts that ``tokens`` tokens with k each choose at least once: 1 - (1 - k/E)^tokens.

        As if tokens chose independently and evenly; real ones agree more, and read fewer.
        """
        return 1.0 - (1.0 - self.top_k / self.num_experts) ** tokens if self.num_experts else 0.0


def sizes_of_config(config: ModelConfig) -> ModelSizes:
    """The sizes of a model that can be built here."""
    a, width = config.attention, config.hidden_size
    table = config.vocab_size * width
    target = Weights(embedding=table, head=0 if config.tie_embeddings else table, small=width)
    for kind in set(config.blocks):
        target = target.plus(_block(kind, config), config.count(kind))
    draft = Weights()
    if config.has_mtp:
        draft = Weights(projections=2 * width * width, small=3 * width)
        for kind in config.mtp_pattern:
            draft = draft.plus(_block(kind, config))
    state, tail = _recurrent_elements(config)
    return ModelSizes(
        target=target,
        draft=draft,
        attention_layers=config.count("attention"),
        draft_layers=config.mtp_pattern.count("attention"),
        num_heads=a.num_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        num_experts=config.moe.num_experts if config.moe else 0,
        top_k=config.moe.top_k if config.moe else 0,
        state_elements=state,
        tail_elements=tail,
        extend_parameters=2 * width * width + _key_value_parameters(a, width) if config.has_mtp else 0,
        max_positions=config.max_positions,
        # Published NVFP4 checkpoints keep Mamba2 projections in FP8 and those of the delta rule in bfloat16.
        nvfp4_recurrent_bytes=1.0 if config.mamba else 2.0,
    )


def _recurrent_elements(config: ModelConfig) -> tuple[int, int]:
    """Numbers of a row's memories and convolution tails, over all recurrent blocks."""
    state = tail = 0
    if d := config.delta:
        state += config.count("delta") * d.num_value_heads * d.key_dim * d.value_dim
        tail += config.count("delta") * (d.conv_kernel - 1) * d.conv_dim
    if m := config.mamba:
        state += config.count("mamba") * m.inner_size * m.state_size
        tail += config.count("mamba") * (m.conv_kernel - 1) * m.conv_dim
    return state, tail


def _block(kind: BlockKind, config: ModelConfig) -> Weights:
    width = config.hidden_size
    counts = {"attention": _attention, "delta": _delta, "mamba": _mamba, "dense": _dense, "moe": _moe}
    return counts[kind](config, width).plus(Weights(small=width))


def _attention(config: ModelConfig, width: int) -> Weights:
    a = config.attention
    inner, key_value = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    queries = inner * (2 if a.output_gate else 1)
    biases = (queries + 2 * key_value if a.qkv_bias else 0) + (width if a.out_bias else 0)
    return Weights(
        projections=width * queries + _key_value_parameters(a, width) + inner * width,
        small=biases + (2 * a.head_dim if a.qk_norm else 0),
    )


def _key_value_parameters(a: AttentionConfig, width: int) -> int:
    return 2 * width * a.num_kv_heads * a.head_dim


def _delta(config: ModelConfig, width: int) -> Weights:
    d = config.delta
    assert isinstance(d, DeltaConfig)
    values = d.num_value_heads * d.value_dim
    return Weights(
        recurrent=width * (d.conv_dim + values) + values * width,
        small=2 * width * d.num_value_heads + d.conv_kernel * d.conv_dim + d.value_dim,
        float32=2 * d.num_value_heads,
    )


def _mamba(config: ModelConfig, width: int) -> Weights:
    m = config.mamba
    assert m is not None
    projected = m.inner_size + m.conv_dim + m.num_heads
    biases = (m.conv_dim if m.conv_bias else 0) + (projected + width if m.proj_bias else 0)
    return Weights(
        recurrent=width * projected + m.inner_size * width,
        small=m.conv_kernel * m.conv_dim + biases + m.inner_size,
        float32=3 * m.num_heads,
    )


def _dense(config: ModelConfig, width: int) -> Weights:
    d = config.dense
    assert d is not None
    inner = _matrices(d.activation) - 1
    return Weights(projections=(inner + 1) * width * d.ffn_size, small=inner * d.ffn_size + width if d.bias else 0)


def _moe(config: ModelConfig, width: int) -> Weights:
    m = config.moe
    assert m is not None
    matrices = _matrices(m.activation)
    return Weights(
        experts=matrices * m.num_experts * (m.latent_size or width) * m.ffn_size,
        projections=matrices * width * m.shared_ffn_size + 2 * width * m.latent_size,
        small=width * m.num_experts + (width if m.shared_ffn_size and m.shared_gate else 0),
        float32=m.num_experts if m.router == "sigmoid" else 0,
    )


def _matrices(activation: Activation) -> int:
    return {"swiglu": 3, "relu2": 2}[activation]
