"""Heads on the disk: one safetensors file that says what they are and which backbone they are for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wmtp_jax.clp.config import HeadsConfig, fingerprint
from wmtp_jax.clp.heads import Heads
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.draft_vocabulary import DraftVocabulary
from wmtp_jax.models.parameters import named_parameters, with_parameters

HEADS_NAME = "heads.safetensors"
_CONFIG = "heads"
_IDS = "draft_ids"


def save_heads(heads: Heads, ids: np.ndarray | None, path: Path, metadata: dict[str, str]) -> None:
    """Writes the heads (bfloat16; the predictor and the gate float32) and the ids of their vocabulary."""
    tensors = {}
    for name, value in named_parameters(heads).items():
        narrow = not name.startswith(("predictor.", "gate."))
        tensors[name] = np.asarray(value.astype(jnp.bfloat16) if narrow else value)
    if ids is not None:
        tensors[_IDS] = np.asarray(ids, np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_suffix(".building")
    save_file(tensors, building, metadata={**metadata, _CONFIG: heads.config.to_json()})
    building.replace(path)


def load_heads(path: Path, model: Decoder) -> tuple[Heads, DraftVocabulary]:
    """Heads in the backbone's dtype. Raises UserError for a damaged file and for heads of another backbone."""
    path = path / HEADS_NAME if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path}: no such file; `wmtp train heads` makes one")
    try:
        with safe_open(path, framework="numpy") as file:
            config = HeadsConfig.from_json((file.metadata() or {}).get(_CONFIG, ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not a complete file of heads ({error}); train or copy them again") from None
    _check_backbone(path, config, model)
    ids = tensors.pop(_IDS, None)
    _check_ids(path, config, ids)
    return _filled(path, config, model, tensors), draft_vocabulary(model, ids)


def draft_vocabulary(model: Decoder, ids: np.ndarray | None) -> DraftVocabulary:
    """The backbone's output head for some tokens, or, the array itself, for all with None."""
    vocab, head = model.config.vocab_size, model.lm_head
    if ids is None:
        everything = jnp.arange(vocab, dtype=jnp.int32)
        if head is not None:
            return DraftVocabulary(everything, head.kernel[...], vocab, axis=0)
        return DraftVocabulary(everything, model.embedding[...], vocab)
    chosen = jnp.asarray(ids)
    return DraftVocabulary(chosen, model.embedding[chosen] if head is None else head.kernel[:, chosen].T, vocab)


def attach(model: Decoder, heads: Heads, vocabulary: DraftVocabulary) -> Decoder:
    """The backbone, its arrays shared, with heads beside it; an MTP layer among them becomes its draft head."""
    joined = jax.tree.map(lambda x: x, model)
    joined.heads = nnx.data(heads)
    if not (vocabulary.is_whole and heads.config.is_mtp):
        joined.draft_vocabulary = nnx.data(vocabulary)
    if heads.mtp is not None:
        joined.mtp = nnx.data(heads.mtp)
    return joined


def _check_backbone(path: Path, config: HeadsConfig, model: Decoder) -> None:
    size, vocab = model.config.hidden_size, model.config.vocab_size
    if (config.hidden_size, config.vocab_size) != (size, vocab):
        raise UserError(
            f"{path}: heads for a backbone of width {config.hidden_size} with {config.vocab_size} tokens, "
            f"and this one has width {size} and {vocab} tokens"
        )
    if config.fingerprint != fingerprint(model):
        raise UserError(f"{path}: heads for another backbone of the same shape; give the one that they were trained on")
    if config.kind == "own" and model.mtp is None:
        raise UserError(f"{path}: goes with the checkpoint's own MTP head, and this checkpoint is loaded without one")


def _check_ids(path: Path, config: HeadsConfig, ids: np.ndarray | None) -> None:
    wanted = (config.draft_vocab,) if config.draft_vocab else None
    found = None if ids is None else ids.shape
    if wanted != found or (ids is not None and (ids.min() < 0 or ids.max() >= config.vocab_size)):
        raise UserError(f"{path}: its draft vocabulary is damaged; train or copy the heads again")


def _filled(path: Path, config: HeadsConfig, model: Decoder, tensors: dict[str, np.ndarray]) -> Heads:
    dtype = model.embedding.dtype
    template = nnx.eval_shape(lambda: Heads(config, model.config, rngs=nnx.Rngs(0), dtype=dtype))
    shapes = named_parameters(template)
    for name in sorted(shapes.keys() ^ tensors.keys()):
        raise UserError(f"{path}: tensor {name} is {'missing' if name in shapes else 'unknown'}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape.shape:
            raise UserError(f"{path}: tensor {name} has shape {tensors[name].shape}, expected {shape.shape}")
        if not np.isfinite(tensors[name].astype(np.float32)).all():
            raise UserError(f"{path}: tensor {name} holds NaN or infinite values")
    return with_parameters(template, {name: jnp.asarray(tensors[name], shapes[name].dtype) for name in shapes})
