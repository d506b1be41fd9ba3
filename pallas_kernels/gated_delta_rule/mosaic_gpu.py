"""Pallas Mosaic GPU (Hopper): the recurrence as written, its state in registers (``mosaic_gpu/recurrence.py``).

A token costs two sums over dk: by count of instructions some 400 cycles, 0.1 ms for a chunk of 512, whatever the number
of rows up to the width of the machine. The chunked form on tensor cores needs six bfloat16 products for one in float32,
inverts in blocks far below a tile of 64, and its chunks remain sequential: at best twice as fast by the same count,
with more rounding.
"""

from typing import Any

from pallas_kernels.mosaic_gpu.recurrence import along, check, recur


def gated_delta_rule(q, k, v, log_decay, beta, state, *, interpret: Any = None):
    check("gated_delta_rule", ("dk", k.shape[-1]), ("dv", v.shape[-1]))
    (out, corrected), state = recur(_token, q, k, v, log_decay, beta, state=state, results=2, interpret=interpret)
    return out, state, corrected


def _token(state, q, k, v, decay, beta):
    """One step on the transposed state [dv dk]: the new state, and the output and the corrected value.

    S^T q after the write is (S^T q before it) + (k . q) u, so both sums read the same state.
    """
    state = state * decay
    keys, queries = along(k, state, 1), along(q, state, 1)
    u = beta * (v - (state * keys).sum(axis=1))
    state = state + keys * along(u, state, 0)
    return state, ((state * queries).sum(axis=1), u)
