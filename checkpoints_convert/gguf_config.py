"""The metadata of a GGUF file in the words of a Hugging Face config.json."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wmtp_jax.errors import UserError

# ``general.architecture`` -> the class of the Hugging Face model.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_REQUIRED: Any = object()
# What no model here computes, and the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Llama 3.1 and later: the file keeps only the factors that come of these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Metadata:
    """Metadata whose types are checked where they are read. Keys below ``.`` belong to the architecture."""

    path: Path
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """Raises UserError for one that is not among ``ARCHITECTURES``."""
        found = self.text("general.architecture")
        if found not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"{self.path}: general.architecture {found!r} is not supported; supported: {known}")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or ``default`` where the file has none. Raises UserError where there is no default."""
        value = self.values.get(self._full(key), default)
        if value is _REQUIRED:
            raise UserError(f"{self.path}: metadata {self._full(key)} is missing; convert the model to GGUF again")
        return value

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """A positive whole number; a list that repeats one, as a file has it by layer, counts as that one."""
        value = self.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "one positive whole number")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def token(self, key: str) -> int | None:
        """A token id, or None where there is none."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self._wrong(key, value, "a token id")
        return value

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _wrong(self, key: str, value: Any, wanted: str) -> UserError:
        return UserError(f"{self.path}: metadata {self._full(key)}={value!r:.60} must be {wanted}")


def hf_config(metadata: Metadata, names: Collection[str], rope_factors: np.ndarray | None) -> dict[str, Any]:
    """A config.json for the tensors called ``names`` in the file; ``rope_factors`` divide the rotary frequencies."""
    architecture = metadata.architecture
    _refuse(metadata)
    heads, hidden = metadata.integer(".attention.head_count"), metadata.integer(".embedding_length")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(metadata),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(".feed_forward_length"),
        "num_hidden_layers": _layers(metadata, names),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(".attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata, hidden, heads),
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer(".context_length"),
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, rope_factors),
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(metadata),
    }
    window = metadata.get(".attention.sliding_window", 0)
    # Qwen2 files can name a window that the model was not trained with; llama.cpp, too, gives it full attention.
    return config if architecture == "qwen2" or not window else {**config, "sliding_window": window}


def _refuse(metadata: Metadata) -> None:
    for key, harmless in _REFUSED.items():
        value = metadata.get(f".{key}")
        if value is not None and value not in harmless:
            full = f"{metadata.architecture}.{key}"
            raise UserError(f"{metadata.path}: {full}={value!r:.60} is not supported; no model here computes it")


def _layers(metadata: Metadata, names: Collection[str]) -> int:
    layers = metadata.integer(".block_count")
    if layers > len(names):
        full = f"{metadata.architecture}.block_count={layers}"
        raise UserError(f"{metadata.path}: {full}, but it holds {len(names)} tensors only; download it again")
    return layers


def _vocab_size(metadata: Metadata) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return metadata.integer(".vocab_size", len(tokens) if isinstance(tokens, list) and tokens else _REQUIRED)


def _head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    """How wide heads are; values and rotary positions must be as wide as keys."""
    if metadata.get(".attention.key_length") is None and hidden % heads:
        head_count = f"{metadata.architecture}.attention.head_count={heads}"
        raise UserError(f"{metadata.path}: {head_count} does not divide the embedding length {hidden}")
    width = metadata.integer(".attention.key_length", hidden // heads)
    for key in (".attention.value_length", ".rope.dimension_count"):
        other = metadata.integer(key, width)
        if other != width:
            full = f"{metadata.architecture}{key}"
            raise UserError(f"{metadata.path}: {full}={other} is not supported; only the width of keys, {width}, is")
    return width


def _eos_ids(metadata: Metadata) -> list[int]:
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(i for i in map(metadata.token, keys) if i is not None))


def _rope_scaling(metadata: Metadata, factors: np.ndarray | None) -> dict[str, Any] | None:
    kind = metadata.text(".rope.scaling.type", "linear")
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 0.0))
    plain = kind == "none" or (kind == "linear" and factor in (0.0, 1.0))
    if factors is not None and not np.all(factors == 1):
        if not plain:
            raise UserError(f"{metadata.path}: rope_freqs.weight and rope.scaling.type {kind!r} together are not known")
        return _llama3(metadata, factors)
    if plain:
        return None
    if kind not in ("linear", "yarn") or factor <= 0:
        raise UserError(
            f"{metadata.path}: rope.scaling.type {kind!r} by {factor} is not supported; linear and yarn are"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        trained = metadata.integer(".rope.scaling.original_context_length", metadata.integer(".context_length"))
        scaling |= {"original_max_position_embeddings": trained}
        scaling |= {name: metadata.number(f".rope.scaling.yarn_{name}", default) for name, default in _RAMPS.items()}
    return scaling


_RAMPS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _llama3(metadata: Metadata, factors: np.ndarray) -> dict[str, Any]:
    """The scaling whose factors these are. Raises UserError for any but those of Llama 3.1 and later."""
    scaling = {"rope_type": "llama3", "factor": float(np.max(factors)), **_LLAMA3}
    width = 2 * len(factors)
    theta = metadata.number(".rope.freq_base", 10000.0)
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(0, width, 2) / width))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5, atol=0):
        raise UserError(
            f"{metadata.path}: rope_freqs.weight holds factors that are not those of Llama 3.1: not supported"
        )
    return scaling
