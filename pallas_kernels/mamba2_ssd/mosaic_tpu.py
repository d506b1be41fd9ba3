"""Pallas kernel for TPUs: the chunked form of ``xla.py``, its state in VMEM (``mosaic_tpu_recurrence.py``)."""

from pallas_kernels.mosaic_tpu_recurrence import dot, recur, weights


def mamba2_ssd(x, b, c, log_decay, state, *, interpret: bool = False):
    """See the front door; returns the outputs and the state after all tokens."""
    (out,), final = recur(_kernel, "mamba2_ssd", c, b, x, log_decay, state=state, results=1, interpret=interpret)
    return out, final


def _kernel(c_ref, b_ref, x_ref, gates_ref, state_ref, out_ref):
    """Decay goes into b and c: with P = 64, x and the outputs fill half a register, b and c a whole one."""
    c, b, x, state = c_ref[...], b_ref[...], x_ref[...], state_ref[...]
    relative, faded, to_end, whole = weights(gates_ref)
    scores = relative * dot("hin,hjn->hij", c, b)
    out_ref[...] = dot("hin,hnp->hip", c * faded, state) + dot("hij,hjp->hip", scores, x)
    state_ref[...] = whole * state + dot("hin,hip->hnp", b * to_end, x)
