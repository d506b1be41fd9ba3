"""Prompts as users give them, checked and turned into token ids."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from wmtp_jax.errors import PromptTooLong, UserError
from wmtp_jax.model import Model

Prompt = str | Sequence[int] | np.ndarray
Prompts = Prompt | Sequence[Prompt]


def encode_prompts(model: Model, prompts: Prompts, *, new_positions: int | None) -> list[list[int]]:
    """Token ids of each prompt; ``new_positions`` is the room that a row needs after its prompt, None for any.

    Raises UserError for prompts that are empty, hold anything but text or valid token ids, or are too long.
    """
    batch = _batch(prompts)
    if not batch:
        raise UserError("there is no prompt")
    return [_checked(model, row, prompt, new_positions) for row, prompt in enumerate(batch)]


def _batch(prompts: Any) -> list[Any]:
    """One prompt, text or a flat row of ids, becomes a batch of one."""
    if isinstance(prompts, str) or _is_row(prompts):
        return [prompts]
    if not _is_sequence(prompts):
        raise UserError(f"prompts must be text, token ids, or a list of either, not {type(prompts).__name__}")
    return list(prompts)


def _is_sequence(value: Any) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, bytes)) or getattr(value, "ndim", 0) > 0


def _is_row(value: Any) -> bool:
    """Whether a sequence holds numbers, right or wrong ones, and not prompts."""
    return _is_sequence(value) and len(value) > 0 and not any(isinstance(x, str) or _is_sequence(x) for x in value)


def _checked(model: Model, row: int, prompt: Any, new_positions: int | None) -> list[int]:
    ids = model.encode(prompt) if isinstance(prompt, str) else _token_ids(row, prompt)
    if not ids:
        raise UserError(f"prompt {row} is empty: it needs at least one token")
    vocab, limit = model.config.vocab_size, model.config.max_positions
    for position, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise UserError(f"prompt {row}: token id {token} at position {position} is not in 0 to {vocab - 1}")
    if new_positions is not None and len(ids) + new_positions > limit:
        raise PromptTooLong(
            f"prompt {row}: {len(ids)} tokens and {new_positions} more for new and drafted tokens exceed the model's "
            f"max_positions={limit}: shorten the prompt or lower max_new_tokens"
        )
    return ids


def _token_ids(row: int, prompt: Any) -> list[int]:
    if not _is_sequence(prompt):
        raise UserError(f"prompt {row} must be text or token ids, not {type(prompt).__name__}")
    for position, token in enumerate(prompt):
        whole = isinstance(token, Integral) or (hasattr(token, "dtype") and np.issubdtype(token.dtype, np.integer))
        if isinstance(token, bool) or not whole:
            raise UserError(f"prompt {row}: {token!r} at position {position} is no token id")
    return [int(token) for token in prompt]
