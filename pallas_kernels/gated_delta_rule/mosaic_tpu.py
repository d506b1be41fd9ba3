"""Pallas kernel for TPUs: the chunked form of ``xla.py``, its state in VMEM (``mosaic_tpu_recurrence.py``)."""

import jax.numpy as jnp

from pallas_kernels.mosaic_tpu_recurrence import column, dot, places, recur, weights


def gated_delta_rule(q, k, v, log_decay, beta, state, *, interpret: bool = False):
    """See the front door; returns the outputs, the state after all tokens and the corrected values."""
    (out, corrected), final = recur(
        _kernel, "gated_delta_rule", q, k, v, log_decay, beta, state=state, results=2, interpret=interpret
    )
    return out, final, corrected


def _kernel(q_ref, k_ref, v_ref, gates_ref, state_ref, out_ref, corrected_ref):
    q, k, v, state = q_ref[...], k_ref[...], v_ref[...], state_ref[...]
    relative, faded, to_end, whole = weights(gates_ref)
    beta = column(gates_ref[:, 2:3])
    at_row, at_column = places(k.shape[1])
    system = jnp.where(at_row > at_column, beta * relative * dot("hik,hjk->hij", k, k), 0.0)
    right = beta * (v - faded * dot("hik,hkv->hiv", k, state))
    u = dot("hij,hjv->hiv", _inverse(system, at_row, at_column), right)
    scores = relative * dot("hik,hjk->hij", q, k)
    out_ref[...] = faded * dot("hik,hkv->hiv", q, state) + dot("hij,hjv->hiv", scores, u)
    corrected_ref[...] = u
    state_ref[...] = whole * state + dot("hik,hiv->hkv", k * to_end, u)


def _inverse(system, at_row, at_column):
    """(I + system)^-1 [h C C] by block inversion: blocks on the diagonal double by the corner below them.

    The blocks are cut out by masks rather than slices, which would be smaller than a register.
    """
    inverse = jnp.where(at_row == at_column, 1.0, 0.0) + jnp.zeros_like(system)
    for level in range((system.shape[-1] - 1).bit_length()):
        pair = (at_row >> level + 1 == at_column >> level + 1) & (at_row >> level > at_column >> level)
        corner = jnp.where(pair, system, 0.0)
        if level:
            corner = dot("hij,hjk->hik", inverse, dot("hij,hjk->hik", corner, inverse))
        inverse = inverse - corner
    return inverse
