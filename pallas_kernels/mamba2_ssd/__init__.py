"""State-space duality, the recurrence of Mamba2 (arXiv 2405.21060), in a form that can be rolled back.

For each head, with state S of shape [N, P] and one step (x, b, c, log decay g)::

    S <- exp(g) S + b x^T;  y = S^T c

H heads share G pairs of b and c: head h reads group h // (H // G). The step size is already in x and g, and the skip
D x is the caller's. A verified run is folded into the state only as far as it is accepted (``commit``).
"""

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import choose
from pallas_kernels.replay import Replay, commit


def mamba2_ssd(
    x: Float[Array, "B T H P"],
    b: Float[Array, "B T G N"],
    c: Float[Array, "B T G N"],
    log_decay: Float[Array, "B T H"],
    state: Float[Array, "B H N P"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H N P"], Replay]:
    """Runs T steps from ``state``; everything in float32, and G divides H.

    A token with x = 0 and log_decay = 0 leaves the state untouched, which is how padded tokens are skipped.
    Returns the outputs, the state after all T tokens, and the ``Replay`` for ``commit``.
    """
    # Accelerators round float32 products to fewer bits unless told otherwise, and the state would carry that on.
    with jax.default_matmul_precision("highest"):
        out, final = choose("mamba2_ssd", implementation)(x, b, c, log_decay, state)
    return out, final, Replay(b, x, log_decay)


__all__ = ["Replay", "commit", "mamba2_ssd"]
