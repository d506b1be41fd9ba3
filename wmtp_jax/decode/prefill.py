"""Reading prompts: fixed-size chunks, whatever the prompt's length, and the first emitted token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, UInt32

from wmtp_jax.cache.paged import allocate, default_page_size
from wmtp_jax.decode.drafter import Drafter
from wmtp_jax.decode.sampling import Likely, Sampling, choose, likely, start_history
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder


def start_state(
    model: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    *,
    page_size: int | None,
    dtype: DTypeLike,
    penalized: bool,
) -> DecodeState:
    """Caches and counters for a batch, before any token is read."""
    rows, run = len(prompts), drafter.gamma + 1
    needs = [len(prompt) + new + run for prompt, new in zip(prompts, max_new_tokens, strict=True)]
    page_size = page_size or default_page_size(max(needs))
    capacities = [round_capacity(positions, page_size) for positions in needs]
    dtype = jnp.dtype(dtype)
    committed = Committed(
        jnp.zeros((rows, run, model.config.hidden_size), model.embedding.dtype),
        jnp.zeros((rows, run), jnp.int32),
        jnp.zeros(rows, jnp.int32),
    )
    return DecodeState(
        cache=allocate(model.config, capacities, page_size, dtype, model.kernels),
        recurrent=model.initial_states(rows),
        draft=drafter.start(model, rows, max(capacities), draft_dtype(model, dtype)),
        length=jnp.zeros(rows, jnp.int32),
        pending=jnp.zeros(rows, jnp.int32),
        committed=committed,
        remaining=jnp.asarray(max_new_tokens, jnp.int32),
        done=jnp.zeros(rows, bool),
        history=start_history(prompts, model.config.vocab_size) if penalized else None,
    )


def draft_dtype(model: Decoder, cache_dtype: DTypeLike) -> DTypeLike:
    """The dtype of draft caches, which a window makes small: only the target's are worth eight bits."""
    return cache_dtype if jnp.dtype(cache_dtype).itemsize > 1 else model.embedding.dtype


def round_capacity(positions: int, page_size: int) -> int:
    """Whole pages, on a grid of four sizes an octave: few distinct shapes, so few compilations, at most 25 % spare."""
    pages = -(-positions // page_size)
    step = max(1, 1 << max(pages.bit_length() - 3, 0))
    return -(-pages // step) * step * page_size


def prefill(
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stops: Int[Array, "B E"],
    *,
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeState:
    """Reads every row's prompt and emits its first token. ``progress`` gets (tokens read, tokens in all)."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    total = int(lengths.max())
    padded = np.zeros((len(prompts), -(-total // chunk) * chunk + 1), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    for begin in range(0, total, chunk):
        tokens, following = padded[:, begin : begin + chunk], padded[:, begin + 1 : begin + chunk + 1]
        valid = np.clip(lengths - begin, 0, chunk).astype(np.int32)
        state = read_chunk(model, drafter, state, tokens, following, valid, lengths)
        if progress:
            jax.block_until_ready(state.length)
            progress(min(begin + chunk, total), total)
    return first_token(model, state, sampling, stops)[0]


@partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def read_chunk(
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    following: Int[Array, "B T"],
    valid: Int[Array, " B"],
    prompt_length: Int[Array, " B"],
) -> DecodeState:
    """The first ``valid`` tokens of a chunk, with those behind each; ``prompt_length`` is the whole prompt's."""
    offsets = jnp.arange(tokens.shape[1])
    counts = offsets < valid[:, None]

    def attend(cache, layer, q, k, v):
        return cache.attend(layer, q, k, v, state.length, counts)

    hidden, recurrent, cache = model.hidden_states(
        tokens, state.length[:, None] + offsets, valid, state.recurrent, state.cache, attend
    )
    draft = drafter.prefill(model, state.draft, hidden, following, state.length, prompt_length)
    newest = jnp.take_along_axis(hidden, jnp.maximum(valid - 1, 0)[:, None, None], axis=1)[:, 0]
    kept = jnp.where((valid > 0)[:, None], newest, state.committed.hidden[:, 0])
    committed = Committed(
        state.committed.hidden.at[:, 0].set(kept), state.committed.tokens, jnp.ones_like(state.committed.count)
    )
    return replace(
        state, cache=cache, recurrent=recurrent, draft=draft, length=state.length + valid, committed=committed
    )


@partial(jax.jit, donate_argnames="state")
def first_token(
    model: Decoder,
    state: DecodeState,
    sampling: Sampling,
    stops: Int[Array, "B E"],
    known: Int[Array, " B"] | None = None,
    allowed: UInt32[Array, "B W"] | None = None,
) -> tuple[DecodeState, Likely | None]:
    """Emits the token after the prompt: the target's choice, or ``known`` where that is not negative.

    Its log-probabilities come with ``Sampling.logprobs``.
    """
    logits = model.logits(state.committed.hidden[:, :1])[:, 0]
    token = choose(sampling, logits, state.length, state.history, allowed)
    if known is not None:
        token = jnp.where(known >= 0, known, token)
    history = state.history
    if history is not None:
        history = history.add(token[:, None], ~state.done[:, None])
    committed = Committed(state.committed.hidden, state.committed.tokens.at[:, 0].set(token), state.committed.count)
    remaining = state.remaining - 1
    done = state.done | (remaining <= 0) | jnp.any(token[:, None] == stops, axis=1)
    new = replace(state, pending=token, committed=committed, remaining=remaining, done=done, history=history)
    return new, likely(logits[:, None], token[:, None]) if sampling.logprobs else None
