"""Chunked form: matrix products inside a chunk, a scan over chunks.

Inside a chunk with cumulative log decay G, the corrected values solve the unit lower triangular system::

    u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S0^T k_i)

It is inverted block by block. The shorter power series of the inverse loses all digits on repetitive text, where the
keys of a chunk are nearly parallel.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import decay

CHUNK = 64


def gated_delta_rule(q, k, v, log_decay, beta, state):
    tokens = q.shape[1]
    inputs = tuple(x.swapaxes(1, 2) for x in (q, k, v, log_decay, beta))
    if tokens <= CHUNK:
        out, state, u = _chunk(state, inputs)
        return out.swapaxes(1, 2), state, u.swapaxes(1, 2)

    split = tuple(_split(x, CHUNK) for x in inputs)

    def body(s, xs):
        out, s, u = _chunk(s, xs)
        return s, (out, u)

    state, (out, u) = jax.lax.scan(body, state, split)
    return _join(out, tokens), state, _join(u, tokens)


def _chunk(state, inputs):
    """One chunk, head-major: q, k [B H C dk], v [B H C dv], log_decay, beta [B H C], state [B H dk dv]."""
    q, k, v, log_decay, beta = inputs
    kept, faded = decay.weights(log_decay)
    strict = jnp.tril(jnp.ones(kept.shape[-2:], bool), -1)
    system = jnp.where(strict, beta[..., None] * kept * jnp.einsum("bhck,bhdk->bhcd", k, k), 0.0)
    from_state = faded[..., None] * jnp.einsum("bhck,bhkv->bhcv", k, state)
    right = beta[..., None] * (v - from_state)
    u = _solve_unit_lower(system, right)
    scores = kept * jnp.einsum("bhck,bhdk->bhcd", q, k)
    out = faded[..., None] * jnp.einsum("bhck,bhkv->bhcv", q, state)
    out = out + jnp.einsum("bhcd,bhdv->bhcv", scores, u)
    to_end = kept[..., -1, :, None]
    state = faded[..., -1, None, None] * state + jnp.einsum("bhck,bhcv->bhkv", k * to_end, u)
    return out, state, u


def _solve_unit_lower(system, right):
    """u with (I + system) u = right, by block inversion that doubles the block size: log2(C) pairs of products.

    Written out because XLA's own triangular solve can hang inside a loop on CPUs with few cores.
    """
    size = system.shape[-1]
    padded = 1 << (size - 1).bit_length()
    system = jnp.pad(system, [(0, 0)] * (system.ndim - 2) + [(0, padded - size)] * 2)
    inverse = jnp.ones((*system.shape[:-2], padded, 1, 1), system.dtype)
    block = 1
    while block < padded:
        pairs = padded // (2 * block)
        tiles = system.reshape(*system.shape[:-2], pairs, 2, block, pairs, 2, block)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -second @ below @ first
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :size, :size] @ right


def _split(x, chunk):
    """[B H T ...] to [chunks B H chunk ...], zero-padded: a zero token leaves the state as it is."""
    tokens = x.shape[2]
    chunks = -(-tokens // chunk)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 3))
    return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, chunk, *x.shape[3:]), 2, 0)


def _join(x, tokens):
    """[chunks B H chunk dv] to [B T H dv]."""
    x = jnp.moveaxis(x, 0, 2)
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :tokens]
    return x.swapaxes(1, 2)
