"""A loaded model: weights, tokenizer and chat template together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from pallas_kernels.dispatch import require_kernels
from wmtp_jax.checkpoint import MODEL_NAME, load_checkpoint
from wmtp_jax.clp.store import attach, load_heads
from wmtp_jax.config import ModelConfig
from wmtp_jax.dtypes import parse_dtype
from wmtp_jax.errors import UserError
from wmtp_jax.folders import DEMO, model_folder
from wmtp_jax.models.decoder import Decoder, prefers_unrolled, unroll, with_kernels
from wmtp_jax.text.chat import ChatTemplate, Message, load_chat_template
from wmtp_jax.text.tokenizer import TOKENIZER_NAME, decode, encode, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Model:
    """What generation needs. Without a tokenizer, prompts are token ids and there is no text."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, from the config, the generation config and the tokenizer together."""
        return self.config.eos_ids

    def encode(self, text: str) -> list[int]:
        """A bare prompt's token ids. Raises UserError without a tokenizer and for invalid Unicode."""
        return encode(self._tokenizer(), text, add_special_tokens=True)

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a piece of a prompt, without what the tokenizer puts around a whole one."""
        return encode(self._tokenizer(), text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation that asks for the next turn. Raises UserError without a chat template."""
        if self.chat_template is None:
            raise UserError("this checkpoint has no chat template: leave --chat out")
        return encode(self._tokenizer(), self.chat_template.render(messages, variables), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens. Raises UserError without a tokenizer."""
        return decode(self._tokenizer(), ids)

    def token_text(self, token: int) -> str:
        """One token's own text, special ones included. Raises UserError without a tokenizer."""
        return self._tokenizer().decode([token], skip_special_tokens=False)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"this checkpoint has no {TOKENIZER_NAME}: give token ids, not text")
        return self.tokenizer


def load(
    path: str | Path = DEMO,
    *,
    dtype: str | jnp.dtype | None = None,
    no_mtp: bool = False,
    kernels: str | None = None,
    heads: str | Path | None = None,
) -> Model:
    """Loads a folder made by ``wmtp convert``, a Hugging Face folder or hub id, or the packaged ``"demo"``.

    ``dtype`` None takes bfloat16 on accelerators and float32 on CPUs. ``no_mtp`` leaves out the draft head, or accepts
    that it is missing. ``heads`` is a file or folder that ``wmtp train heads`` made for this model. ``kernels`` names
    the implementation of every operation in ``pallas_kernels``; None lets them choose. Raises UserError for what cannot
    be loaded, and UnsupportedKernel for kernels that cannot run here.
    """
    # The converter builds on this package, so it can only be imported late.
    from checkpoints_convert.load import load_hf

    require_kernels(kernels)
    dtype = parse_dtype(dtype)
    folder = model_folder(path)
    if (folder / MODEL_NAME).is_file():
        config, decoder = load_checkpoint(folder, dtype, no_mtp=no_mtp)
    else:
        config, decoder = load_hf(folder, dtype=dtype, no_mtp=no_mtp)
    if prefers_unrolled(config):
        decoder = unroll(decoder)
    if heads is not None:
        decoder = attach(decoder, *load_heads(Path(heads), decoder))
    return Model(
        decoder=with_kernels(decoder, kernels) if kernels else decoder,
        config=config,
        tokenizer=load_tokenizer(folder),
        chat_template=load_chat_template(folder),
    )


def logits(model: Model, ids: Sequence[int] | Sequence[Sequence[int]] | Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Float32 logits at every position, without a cache: for parity checks. One row of ids gives B = 1.

    Raises UserError for ids that are no rectangle of valid token ids.
    """
    try:
        tokens = jnp.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        raise UserError("logits take one row of token ids, or rows of equal length") from None
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError("logits take one row of token ids, or rows of equal length")
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.config.vocab_size:
        raise UserError(f"token ids must be from 0 to {model.config.vocab_size - 1}")
    return _logits(model.decoder, tokens)


@jax.jit
def _logits(decoder: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    return decoder.logits(decoder.sequence(tokens))
