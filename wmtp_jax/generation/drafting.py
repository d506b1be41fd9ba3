"""From options to a drafter."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from wmtp_jax.clp.adaptive import Adaptive
from wmtp_jax.clp.drafter import heads_drafter
from wmtp_jax.clp.trusting import Trusting
from wmtp_jax.decode.drafter import MTPDrafter, Plain, Proposing
from wmtp_jax.decode.loop import Stepping
from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import AUTO, GenerateOptions
from wmtp_jax.model import Model
from wmtp_jax.models.decoder import Decoder


def make_drafter(model: Model, options: GenerateOptions) -> Proposing | Stepping:
    """The drafter that the options ask for. Raises UserError where the model lacks what it needs."""
    heads = model.decoder.heads
    if heads is not None and heads.config.competing and (options.gamma == AUTO or options.accept == "clp"):
        raise UserError("competing heads have no use for predicted lengths: give accept=all, or a number as gamma")
    if options.drafter is not None:
        return options.drafter
    if options.accept != "verify":
        return _trusting(model.decoder, options)
    if not options.gamma:
        return Plain()
    drafter = _drafter(model.decoder, options, _count(model.decoder, options))
    return Adaptive(drafter=drafter) if options.gamma == AUTO else drafter


def _count(model: Decoder, options: GenerateOptions) -> int:
    """Drafts a step; where they are chosen, no more than a predictor has been trained for."""
    if options.gamma != AUTO or model.heads is None:
        return options.most_drafts
    return min(model.heads.config.drafts, options.most_drafts)


def _drafter(model: Decoder, options: GenerateOptions, gamma: int) -> Proposing:
    if model.heads is not None:
        return heads_drafter(model, gamma, options.window, options.draft_sink)
    if model.mtp is None:
        raise UserError(f"gamma={options.gamma}: this checkpoint has no MTP head to draft with; use gamma=0")
    return MTPDrafter(gamma=gamma, window=options.window, sink=options.draft_sink)


def _trusting(model: Decoder, options: GenerateOptions) -> Trusting:
    """Raises UserError for a rule that needs what was not trained."""
    if model.heads is None and options.accept in ("clp", "gate"):
        raise UserError(
            f"accept={options.accept} needs trained heads: `wmtp train heads` makes them, --heads takes them"
        )
    if not options.gamma:
        raise UserError(f"accept={options.accept}: gamma=0 leaves no head to trust")
    inner = _drafter(model, options, options.most_drafts)
    return Trusting(drafter=inner, rule=options.accept, tau=options.tau)  # pyright: ignore[reportArgumentType]


def checked_costs(costs: Sequence[float], numbers: int) -> Float[Array, " N"]:
    """Given step costs as an array. Raises UserError unless there is one for every number of drafts."""
    if len(costs) != numbers:
        raise UserError(f"step_costs: {len(costs)} costs, and steps have 0 to {numbers - 1} drafts: give {numbers}")
    return jax.device_put(jnp.asarray(list(costs), jnp.float32))
