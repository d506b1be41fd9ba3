"""What every head says after every token of whole sequences, and when it is right: for training and for labels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from wmtp_jax.clp.heads import Heads
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.draft_vocabulary import DraftVocabulary
from wmtp_jax.models.mtp import MTP
from wmtp_jax.train.loss import draft_outputs


class Judged(NamedTuple):
    """For every head and position: its loss in nats, whether it is right and whether it counts; and each head's logits.

    A position counts where the token that the head should write is there and is one to learn. A token outside the
    heads' vocabulary has no loss and is never right.
    """

    loss: Float[Array, "k B T"]
    right: Bool[Array, "k B T"]
    counted: Bool[Array, "k B T"]
    logits: list[Float[Array, "B T U"]]


def judge(
    model: Decoder,
    heads: Heads,
    vocabulary: DraftVocabulary,
    hidden: Float[Array, "B T M"],
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> Judged:
    """All heads on sequences whose hidden states the backbone has given."""
    logits = head_logits(model, heads, vocabulary, hidden, tokens)
    index = (
        jnp.full(model.config.vocab_size, -1, jnp.int32).at[vocabulary.ids[...]].set(jnp.arange(logits[0].shape[-1]))
    )
    losses, rights, counts = [], [], []
    for head, own in enumerate(logits):
        ahead = heads.config.offset + head
        target = index[jnp.roll(tokens, -ahead, axis=1)]
        there = jnp.arange(tokens.shape[1]) < tokens.shape[1] - ahead
        count = jnp.roll(counted, -ahead, axis=1) & there
        picked = jnp.take_along_axis(own, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        loss = jnp.where(count & (target >= 0), jax.nn.logsumexp(own, axis=-1) - picked, 0.0)
        losses.append(loss)
        rights.append(count & (own.argmax(axis=-1) == target))
        counts.append(count)
    return Judged(jnp.stack(losses), jnp.stack(rights), jnp.stack(counts), logits)


def head_logits(
    model: Decoder,
    heads: Heads,
    vocabulary: DraftVocabulary,
    hidden: Float[Array, "B T M"],
    tokens: Int[Array, "B T"],
) -> list[Float[Array, "B T U"]]:
    """Every head's logits after every token; an MTP layer is fed the tokens that really come next."""
    if not heads.config.is_mtp:
        return heads.logits(vocabulary, hidden)
    outputs = draft_outputs(model, head_layer(model, heads), hidden, tokens, heads.config.k)
    return [vocabulary.logits(output) for output in outputs]


def head_layer(model: Decoder, heads: Heads) -> MTP:
    """The MTP layer of recurrent heads, trained here or brought by the checkpoint."""
    layer = heads.mtp if heads.mtp is not None else model.mtp
    assert layer is not None
    return layer


def spans(judged: Judged) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The label of every position, how many heads in a row are right, and where all of them count."""
    runs = jnp.cumprod(judged.right, axis=0).sum(axis=0)
    return runs.astype(jnp.int32), jnp.all(judged.counted, axis=0)
