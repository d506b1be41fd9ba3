"""Pallas Mosaic GPU (Hopper): the recurrence as written, its state in registers (``mosaic_gpu/recurrence.py``).

128 heads of 64 columns are a block each, one a multiprocessor. A token costs a sum over N and three operations an
element of the state: by count of instructions some 300 cycles, under 0.1 ms for a chunk of 512, and for a verified run
of 9 tokens about what its state takes through memory. The chunked form on tensor cores would shorten the chunk alone,
for six bfloat16 products each.
"""

from typing import Any

from pallas_kernels.mosaic_gpu.recurrence import along, check, recur


def mamba2_ssd(x, b, c, log_decay, state, *, interpret: Any = None):
    """See the front door; returns the outputs and the state after all tokens."""
    check("mamba2_ssd", ("N", b.shape[-1]), ("P", x.shape[-1]))
    (out,), state = recur(_token, c, b, x, log_decay, state=state, results=1, interpret=interpret)
    return out, state


def _token(state, c, b, x, decay):
    """One step on the transposed state [P N]: the new state, and the output."""
    state = state * decay + along(b, state, 1) * along(x, state, 0)
    return state, ((state * along(c, state, 1)).sum(axis=1),)
