"""What heads are trained on: token sequences and the frozen backbone's hidden states after every token.

The backbone reads everything once; its states are kept on the disk, so that an epoch costs only the heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.models.decoder import Decoder

Note = Callable[[str], None]
_TOKENS, _COUNTED, _HIDDEN = "tokens.npy", "counted.npy", "hidden.npy"


@dataclass(frozen=True)
class Sequences:
    """Token ids [R, T], and which of them a head should learn to write: all of a text's, only the answer of a chat."""

    tokens: Int[np.ndarray, "R T"]
    counted: Bool[np.ndarray, "R T"]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Collected:
    """Sequences with the backbone's normed hidden states, bfloat16 on the disk."""

    sequences: Sequences
    hidden: np.ndarray

    def __len__(self) -> int:
        return len(self.sequences)

    def batch(self, rows: Int[np.ndarray, " B"]) -> tuple[Array, Array, Array]:
        """Hidden states (bfloat16), tokens and counted of some rows."""
        order = np.sort(rows)
        hidden = jnp.asarray(np.asarray(self.hidden[order]).view(ml_dtypes.bfloat16))
        return hidden, jnp.asarray(self.sequences.tokens[order]), jnp.asarray(self.sequences.counted[order])


def text_sequences(model: Model, texts: Sequence[str], length: int, limit: int) -> Sequences:
    """Texts as they are, one after the other with an end token between, cut to ``length``; at most ``limit`` tokens."""
    ids: list[int] = []
    for text in texts:
        ids += [*model.encode_bare(text), *model.eos_ids[:1]]
        if len(ids) >= limit:
            break
    rows = min(len(ids), limit) // length
    if not rows:
        raise UserError(f"the text has only {len(ids)} tokens, and a sequence {length}: give more text or --length")
    tokens = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    return Sequences(tokens, np.ones_like(tokens, bool))


def collect(model: Decoder, folder: Path, make: Callable[[], Sequences], rows: int, note: Note) -> Collected:
    """The sequences that ``make`` gives and the backbone's states, from ``folder`` where an earlier run left them.

    The folder appears whole or not at all.
    """
    # The converter builds on this package, so it can only be imported late.
    from checkpoints_convert.atomic import atomic_folder

    if not folder.is_dir():
        sequences = make()
        shape = (*sequences.tokens.shape, model.config.hidden_size)
        with atomic_folder(folder.absolute(), force=False, needed_bytes=2 * int(np.prod(shape))) as building:
            np.save(building / _TOKENS, sequences.tokens)
            np.save(building / _COUNTED, sequences.counted)
            states = np.lib.format.open_memmap(building / _HIDDEN, mode="w+", dtype=np.uint16, shape=shape)
            done = 0
            for part in _states(model, sequences.tokens, rows):
                states[done : done + len(part)] = part
                done += len(part)
                note(f"{done} of {len(sequences)} sequences read")
            states.flush()
    try:
        tokens, counted = np.load(folder / _TOKENS), np.load(folder / _COUNTED)
        return Collected(Sequences(tokens, counted), np.load(folder / _HIDDEN, mmap_mode="r"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: damaged training data ({error}); remove it, and it is made again") from None


def _states(model: Decoder, tokens: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    for begin in range(0, len(tokens), rows):
        part = tokens[begin : begin + rows]
        padded = np.concatenate([part, np.repeat(part[:1], rows - len(part), axis=0)])
        hidden = _hidden(model, jnp.asarray(padded)).astype(jnp.bfloat16)
        yield np.asarray(hidden).view(np.uint16)[: len(part)]


@jax.jit
def _hidden(model: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    return model.sequence(tokens)


def split(collected: Collected, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers for the heads (four fifths), for the length predictor, and held out from both (a tenth each)."""
    order = np.random.default_rng(seed).permutation(len(collected))
    tenth = len(order) // 10
    if not tenth:
        raise UserError(f"only {len(order)} training sequences: at least 10 are needed, to hold some out")
    return order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth]


def frequent_tokens(sequences: Sequences, size: int, vocab: int) -> Int[np.ndarray, " U"] | None:
    """The ``size`` tokens written most often, by id; None for all."""
    if not size or size >= vocab:
        return None
    counts = np.bincount(sequences.tokens[sequences.counted], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
