"""Next-token loss of the target and multi-step loss of its draft head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.mtp import MTP

MTP_STEP_DECAY = 0.6  # Weight of each further recurrent step, as in FastMTP (arXiv 2509.18362).


class Losses(NamedTuple):
    """Mean losses in nats a token, and top-1 accuracies; one entry a draft position for the head."""

    target: Float[Array, ""]
    target_accuracy: Float[Array, ""]
    draft: Float[Array, " steps"]
    draft_accuracy: Float[Array, " steps"]


def losses(model: Decoder, tokens: Int[Array, "B T"], mtp_steps: int) -> Losses:
    """Losses of one batch of whole sequences."""
    hidden = model.sequence(tokens)
    target, accuracy = _cross_entropy(model, hidden, tokens, 1)
    if model.mtp is None or not mtp_steps:
        empty = jnp.zeros(0)
        return Losses(target, accuracy, empty, empty)
    outputs = draft_outputs(model, model.mtp, hidden, tokens, mtp_steps)
    draft = [_cross_entropy(model, y, tokens, step + 2) for step, y in enumerate(outputs)]
    return Losses(target, accuracy, jnp.stack([x for x, _ in draft]), jnp.stack([x for _, x in draft]))


def total(value: Losses, mtp_weight: float) -> Float[Array, ""]:
    """The scalar that is minimized: target loss plus the weighted mean of the draft losses."""
    steps = value.draft.shape[0]
    if not steps:
        return value.target
    weights = MTP_STEP_DECAY ** jnp.arange(steps)
    return value.target + mtp_weight * jnp.sum(weights * value.draft) / jnp.sum(weights)


def draft_outputs(
    model: Decoder, mtp: MTP, hidden: Float[Array, "B T M"], tokens: Int[Array, "B T"], steps: int
) -> list[Float[Array, "B T M"]]:
    """Outputs of every recurrent step from every position, seeing exactly the keys that decoding sees.

    Row i of step s continues entry i: it attends to the true entries 0..i and to its own recurrent entries, which is
    what a draft at committed length i + 1 reads.
    """
    base_positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    outputs, own, base, previous = [], [], None, hidden
    for step in range(steps):
        entries = mtp.entries(previous, model.embed(jnp.roll(tokens, -1 - step, axis=1)))
        positions = base_positions + step
        keys_values = mtp.keys_values(entries, positions)
        if base is None:
            base = keys_values
        else:
            own.append(keys_values)
        previous = mtp.outputs(entries, positions, lambda q, base=base, own=tuple(own): _attend(q, base, own))
        outputs.append(previous)
    return outputs


def _attend(q, base, own):
    """Causal attention over the true entries, plus each row's own recurrent entries."""
    rows, length, heads, size = q.shape
    kv_heads = base[0].shape[2]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, size) * size**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, jnp.einsum("btkgd,bskd->bkgts", q, base[0]), -jnp.inf)
    mine = [jnp.einsum("btkgd,btkd->bkgt", q, k)[..., None] for k, _ in own]
    weights = jax.nn.softmax(jnp.concatenate([scores, *mine], axis=-1).astype(jnp.float32), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights[..., :length], base[1])
    for index, (_, v) in enumerate(own):
        out = out + jnp.einsum("bkgt,btkd->btkgd", weights[..., length + index], v)
    return out.reshape(rows, length, heads, size)


def _cross_entropy(
    model: Decoder, hidden: Float[Array, "B T M"], tokens: Int[Array, "B T"], ahead: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Loss and accuracy of predicting the token ``ahead`` positions later; the last ``ahead`` rows have none."""
    logits = model.logits(hidden[:, :-ahead])
    targets = tokens[:, ahead:]
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.mean(loss), jnp.mean(logits.argmax(-1) == targets)
