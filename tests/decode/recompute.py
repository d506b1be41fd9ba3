"""Decoding as its definition has it: the whole sequence anew for every token, no cache and no drafts."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from tests.decode.driving import Batch
from wmtp_jax.decode.sampling import History, Sampling, choose
from wmtp_jax.models.decoder import Decoder


@jax.jit
def _next_tokens(
    model: Decoder, tokens: Int[Array, "B C"], lengths: Int[Array, " B"], sampling: Sampling, history: History | None
) -> Int[Array, " B"]:
    hidden = jnp.take_along_axis(model.sequence(tokens), (lengths - 1)[:, None, None], axis=1)
    return choose(sampling, model.logits(hidden)[:, 0], lengths, history)


def next_tokens(model: Decoder, batch: Batch, texts: list[list[int]]) -> np.ndarray:
    """The token [B] that follows each row's prompt and text."""
    whole = [[*prompt, *text] for prompt, text in zip(batch.prompts, texts, strict=True)]
    tokens = np.zeros((len(whole), batch.shape.capacity), np.int32)
    for row, sequence in zip(tokens, whole, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in whole], np.int32)
    return np.asarray(_next_tokens(model, tokens, lengths, batch.sampling, _history(batch, texts)))


def recomputed(model: Decoder, batch: Batch) -> list[list[int]]:
    """Each row's text, up to its stop token or its limit."""
    texts: list[list[int]] = [[] for _ in batch.requests]
    while True:
        going = [
            not text or (text[-1] != request.stop and len(text) < request.limit)
            for text, request in zip(texts, batch.requests, strict=True)
        ]
        if not any(going):
            return texts
        for text, token, goes in zip(texts, next_tokens(model, batch, texts), going, strict=True):
            if goes:
                text.append(int(token))


def assert_same_texts(model: Decoder, batch: Batch, expected: list[list[int]], got: list[list[int]], what: str) -> bool:
    """Fails where a text differs, unless rounding alone decides between the two tokens it first differs in.

    Returns whether all texts are equal.
    """
    for row, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
            assert same is not None, f"{what}: row {row}: {len(other)} tokens, not {len(one)}"
            assert _is_a_tie(model, batch, row, one[:same]), f"{what}: row {row} at {same}: {other}, not {one}"
    return expected == got


def _is_a_tie(model: Decoder, batch: Batch, row: int, text: list[int]) -> bool:
    """Whether a relative change of the embedding by a few roundings changes the token that follows ``text``."""
    texts: list[list[int]] = [[] for _ in batch.requests]
    texts[row] = text
    choices = set()
    for seed in range(6):
        noise = 1.0 + 3e-6 * np.random.default_rng(seed).standard_normal(model.embedding.shape)
        shaken = jax.tree.map(lambda x: x, model)
        shaken.embedding = type(model.embedding)(jnp.asarray(model.embedding[...] * noise, jnp.float32))
        choices.add(int(next_tokens(shaken, batch, texts)[row]))
    return len(choices) > 1


def _history(batch: Batch, texts: list[list[int]]) -> History | None:
    if not batch.shape.penalized:
        return None
    in_prompt = np.zeros((len(texts), batch.shape.vocab), bool)
    emitted = np.zeros(in_prompt.shape, np.int32)
    for row, (prompt, text) in enumerate(zip(batch.prompts, texts, strict=True)):
        in_prompt[row, prompt] = True
        np.add.at(emitted[row], text, 1)
    return History(jnp.asarray(in_prompt), jnp.asarray(emitted))
