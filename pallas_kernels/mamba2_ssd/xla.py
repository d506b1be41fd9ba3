"""Chunked form: matrix products inside a chunk, a scan over chunks; a short run goes token by token through the state.

Inside a chunk with cumulative log decay G, from the state S0 before it::

    y_i = exp(G_i) S0^T c_i + sum_{j<=i} exp(G_i - G_j) (c_i . b_j) x_j

The scores c . b are one for all heads of a group, and so is either side of the products with b and c: the scan holds
the states of a group side by side, [N, h P], and no b or c is repeated a head.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import decay
from pallas_kernels.replay import SHORT, fold

CHUNK = 64
"""Products with the state cost 4 N P a token and head, those inside the chunk 2 C P: with N = 128, a fifth of all at
64 and a third at 128, while the state crosses memory every C tokens."""


def mamba2_ssd(x, b, c, log_decay, state):
    """See the front door; returns the outputs and the state after all tokens."""
    rows, tokens, heads, width = x.shape
    groups, size = b.shape[2:]
    if tokens <= SHORT:
        return _short(x, b, c, log_decay, state)

    together, chunk = heads // groups, min(CHUNK, tokens)
    x, b, c, g = (
        _split(z.reshape(rows, tokens, groups, *rest), chunk)
        for z, rest in ((x, (together, width)), (b, (size,)), (c, (size,)), (log_decay, (together,)))
    )
    state = state.reshape(rows, groups, together, size, width).swapaxes(2, 3)
    state, out = jax.lax.scan(_chunk, state, (x, b, c, g))
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(rows, -1, heads, width)[:, :tokens]
    return out, state.swapaxes(2, 3).reshape(rows, heads, size, width)


def _chunk(state, inputs):
    """One chunk of every group: x [B G C h P], b, c [B G C N], log_decay [B G C h], state [B G N h P]."""
    x, b, c, log_decay = inputs
    weights, faded = decay.weights(log_decay.swapaxes(2, 3))
    scores = jnp.einsum("bgin,bgjn->bgij", c, b)[:, :, None] * weights
    out = jnp.einsum("bgin,bgnhp->bgihp", c, state) * faded.swapaxes(2, 3)[..., None]
    out = out + jnp.einsum("bghij,bgjhp->bgihp", scores, x)
    to_end = weights[..., -1, :].swapaxes(2, 3)[..., None]
    state = state * faded[:, :, None, :, -1:] + jnp.einsum("bgjn,bgjhp->bgnhp", b, x * to_end)
    return state, out


def _short(x, b, c, log_decay, state):
    """The same sums for a few tokens: each reads the state once, which is written once."""
    together = x.shape[2] // b.shape[2]
    weights, faded = decay.weights(log_decay.swapaxes(1, 2))
    scores = jnp.repeat(jnp.einsum("bign,bjgn->bgij", c, b), together, axis=1) * weights
    c = jnp.repeat(c, together, axis=2)
    read = jnp.stack([jnp.einsum("bhn,bhnp->bhp", c[:, t], state) for t in range(x.shape[1])], axis=1)
    out = read * faded.swapaxes(1, 2)[..., None] + jnp.einsum("bhij,bjhp->bihp", scores, x)
    return out, fold(state, b, x, log_decay)


def _split(z, chunk):
    """[B T G ...] to [chunks B G C ...], zero-padded: a zero token leaves the state as it is."""
    rows, tokens = z.shape[:2]
    chunks = -(-tokens // chunk)
    z = jnp.pad(z, [(0, 0), (0, chunks * chunk - tokens)] + [(0, 0)] * (z.ndim - 2))
    return jnp.moveaxis(z.reshape(rows, chunks, chunk, *z.shape[2:]), (1, 3), (0, 2))
