"""What a family declares: how to read its config, which stored tensor fills which parameter, what may be skipped."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from checkpoints_convert.layouts import ExpertList, Layout, PackedExperts, Same, Transposed
from wmtp_jax.config import BlockKind, ModelConfig


class Entry(NamedTuple):
    """One parameter (``blocks.7.mixer.q_proj.kernel``; 7 counts every block) and the tensors it is made from."""

    parameter: str
    sources: tuple[str, ...]
    layout: Layout


class ParseConfig(Protocol):
    """Reads config.json; ``mtp_in_files`` settles families whose config does not mention their draft head."""

    def __call__(self, hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig: ...


class Skip(NamedTuple):
    """Tensors left out on purpose."""

    pattern: re.Pattern[str]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything the converter knows about one family of checkpoints."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    parse_config: ParseConfig
    table: Callable[[ModelConfig, Collection[str]], list[Entry]]
    # The inverse of ``parse_config``, for families that models are exported to; None for a model that is not theirs.
    describe: Callable[[ModelConfig], dict[str, Any] | None] | None = None
    skips: tuple[Skip, ...] = ()


ROPE_BUFFERS = Skip(re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"), "rotary table, computed anew")
VISION = Skip(re.compile(r"^(model\.)?(visual|vision_tower|vision_model)\."), "vision tower, text only here")

# Parameter suffix inside a block -> (stored suffix inside the layer, layout).
Names = dict[str, tuple[str, Layout]]

MTP_PREFIX = "mtp."
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")


def projections(stored: str, names: Collection[str], *, bias: bool = False) -> Names:
    """Kernels (and biases) of projections that both sides call the same; ``stored`` is the stored module's prefix."""
    found: Names = {f"mixer.{name}.kernel": (f"{stored}{name}.weight", Transposed()) for name in names}
    if bias:
        found |= {f"mixer.{name}.bias": (f"{stored}{name}.bias", Same()) for name in names}
    return found


def attention_names(config: ModelConfig) -> Names:
    """A softmax attention block behind its norm."""
    a = config.attention
    names: Names = {"norm.weight": ("input_layernorm.weight", Same())}
    names |= projections("self_attn.", ("q_proj", "k_proj", "v_proj"), bias=a.qkv_bias)
    names |= projections("self_attn.", ("o_proj",), bias=a.out_bias)
    if a.qk_norm:
        names |= {f"mixer.{n}.weight": (f"self_attn.{n}.weight", Same()) for n in ("q_norm", "k_norm")}
    return names


def dense_names(config: ModelConfig) -> Names:
    """A SwiGLU block behind its norm."""
    assert config.dense is not None
    names: Names = {"norm.weight": ("post_attention_layernorm.weight", Same())}
    return names | projections("mlp.", ("gate_proj", "up_proj", "down_proj"), bias=config.dense.bias)


def moe_names(config: ModelConfig) -> Names:
    """Router and shared expert of a mixture; ``expert_entries`` adds the experts."""
    assert config.moe is not None
    names: Names = {
        "norm.weight": ("post_attention_layernorm.weight", Same()),
        "mixer.router.kernel": ("mlp.gate.weight", Transposed()),
    }
    if config.moe.shared_ffn_size:
        for name in ("gate_proj", "up_proj", "down_proj"):
            names[f"mixer.shared_expert.{name}.kernel"] = (f"mlp.shared_expert.{name}.weight", Transposed())
        names["mixer.shared_expert_gate.kernel"] = ("mlp.shared_expert_gate.weight", Transposed())
    return names


def expert_entries(block: str, layer: str, config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """The experts of one layer, packed or one by one: whichever this layer stores."""
    experts = f"{layer}mlp.experts."
    packed = f"{experts}0.gate_proj.weight" not in stored
    pieces = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    return stacked_experts(block, experts, pieces, config, packed)


def stacked_experts(
    block: str, experts: str, pieces: dict[str, tuple[str, ...]], config: ModelConfig, packed: bool
) -> list[Entry]:
    """A mixture's stacked parameters, each with what one expert stores of it when experts are stored one by one."""
    assert config.moe is not None
    entries = []
    for name, parts in pieces.items():
        numbers = range(config.moe.num_experts)
        listed = tuple(f"{experts}{e}.{part}.weight" for e in numbers for part in parts)
        sources, layout = ((f"{experts}{name}",), PackedExperts()) if packed else (listed, ExpertList(len(parts)))
        entries.append(Entry(f"{block}mixer.{name}", sources, layout))
    return entries


def layer_entries(
    block: str, layer: str, kind: BlockKind, names: Names, config: ModelConfig, stored: Collection[str]
) -> list[Entry]:
    """One block's entries from the names inside it; ``block`` and ``layer`` are the prefixes on either side."""
    entries = [Entry(block + ours, (layer + theirs,), layout) for ours, (theirs, layout) in names.items()]
    return entries + (expert_entries(block, layer, config, stored) if kind == "moe" else [])


def backbone_prefix(stored: Collection[str]) -> str:
    """Where the text decoder lives: ``model.language_model.``, ``model.``, or at the top."""
    found = (prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in stored)
    return next(found, "model.")


def ends_entries(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Embedding, final norm and, where it is not tied, the output head."""
    prefix = backbone_prefix(stored)
    entries = [
        Entry("embedding", (f"{prefix}embed_tokens.weight",), Same()),
        Entry("final_norm.weight", (f"{prefix}norm.weight",), Same()),
    ]
    return entries if config.tie_embeddings else [*entries, Entry("lm_head.kernel", (head_name(stored),), Transposed())]


def head_name(stored: Collection[str]) -> str:
    """The output head's stored name."""
    nested = "language_model.lm_head.weight"
    return nested if nested in stored else "lm_head.weight"


def backbone_entries(config: ModelConfig, stored: Collection[str], names: Callable[[BlockKind], Names]) -> list[Entry]:
    """Every block of a decoder whose layers are two blocks: a token mixer, then a feed-forward."""
    prefix, entries = backbone_prefix(stored), []
    for index, kind in enumerate(config.blocks):
        block, layer = f"blocks.{index}.", f"{prefix}layers.{index // 2}."
        entries += layer_entries(block, layer, kind, names(kind), config, stored)
    return entries


def mtp_entries(config: ModelConfig, stored: Collection[str], names: Callable[[BlockKind], Names]) -> list[Entry]:
    """The draft head in the ``mtp.*`` arrangement that Qwen3-Next and Qwen3.5 share."""
    if not config.has_mtp:
        return []
    entries = [
        Entry("mtp.embedding_norm.weight", ("mtp.pre_fc_norm_embedding.weight",), Same()),
        Entry("mtp.hidden_norm.weight", ("mtp.pre_fc_norm_hidden.weight",), Same()),
        Entry("mtp.fc.kernel", ("mtp.fc.weight",), Transposed()),
        Entry("mtp.norm.weight", ("mtp.norm.weight",), Same()),
    ]
    for index, kind in enumerate(config.mtp_pattern):
        entries += layer_entries(f"mtp.blocks.{index}.", "mtp.layers.0.", kind, names(kind), config, stored)
    return entries
