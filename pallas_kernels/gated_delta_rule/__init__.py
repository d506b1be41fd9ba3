"""Gated delta rule (Gated DeltaNet, arXiv 2412.06464), with a form that can be rolled back after verification.

For each head, with state S of shape [dk, dv] and one step (q, k, v, log decay g, write strength beta)::

    S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q

The corrected values u of a token never depend on later tokens, so the state after any prefix of a verified run is a
weighted sum over the stored (k, u) pairs: rejected tokens are simply left out (``commit``).
"""

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import choose
from pallas_kernels.replay import Replay, commit


def gated_delta_rule(
    q: Float[Array, "B T H dk"],
    k: Float[Array, "B T H dk"],
    v: Float[Array, "B T H dv"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H dk dv"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B H dk dv"], Replay]:
    """Runs T steps from ``state``; everything in float32.

    A token with ``log_decay = beta = 0`` leaves the state untouched, which is how padded tokens are skipped.
    Returns the outputs, the state after all T tokens, and the ``Replay`` for ``commit``.
    """
    # Accelerators round float32 products to fewer bits unless told otherwise, and the state would carry that on.
    with jax.default_matmul_precision("highest"):
        out, final, corrected = choose("gated_delta_rule", implementation)(q, k, v, log_decay, beta, state)
    return out, final, Replay(k, corrected, log_decay)


__all__ = ["Replay", "commit", "gated_delta_rule"]
