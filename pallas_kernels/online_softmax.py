"""Softmax-weighted sums over keys that arrive block by block (Milakov and Gimelshein, arXiv 1805.02867)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# A finite stand-in for minus infinity: differences of two of them stay finite.
MASKED = -1e30


class Partial(NamedTuple):
    """Running maximum, sum of weights and weighted values of the keys seen so far, float32."""

    maximum: Float[Array, "B K Q"]
    total: Float[Array, "B K Q"]
    weighted: Float[Array, "B K Q D"]


def start(q: Float[Array, "B K Q D"]) -> Partial:
    """No keys seen."""
    shape = q.shape[:-1]
    return Partial(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))


def add(
    partial: Partial,
    q: Float[Array, "B K Q D"],
    k: Float[Array, "B K P D"],
    v: Float[Array, "B K P D"],
    visible: Bool[Array, "B Q P"],
    k_scale: Float[Array, "B K P"] | None = None,
    v_scale: Float[Array, "B K P"] | None = None,
) -> Partial:
    """Takes in one block of keys and values, of q's dtype or narrower; eight-bit ones come with a scale a key.

    The scales are applied to scores and weights, P numbers a query in place of P * D.
    """
    if k.dtype.itemsize < q.dtype.itemsize:
        # Together with cutting the block out of the cache this is one pass, and reads fewer bytes than wide keys.
        k, v = k.astype(q.dtype), v.astype(q.dtype)
    # Accelerators round float32 products to fewer bits unless told otherwise.
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("bkqd,bkpd->bkqp", q, k, preferred_element_type=jnp.float32, precision=exact)
    scores = scores * q.shape[-1] ** -0.5
    if k_scale is not None:
        scores = scores * k_scale[:, :, None]
    scores = jnp.where(visible[:, None], scores, MASKED)
    maximum = jnp.maximum(partial.maximum, scores.max(axis=-1))
    weights = jnp.where(visible[:, None], jnp.exp(scores - maximum[..., None]), 0.0)
    old = jnp.exp(partial.maximum - maximum)
    total = partial.total * old + weights.sum(axis=-1)
    if v_scale is not None:
        weights = weights * v_scale[:, :, None]
    weights = weights.astype(v.dtype)
    added = jnp.einsum("bkqp,bkpd->bkqd", weights, v, preferred_element_type=jnp.float32, precision=exact)
    return Partial(maximum, total, partial.weighted * old[..., None] + added)


def merge(partials: Partial) -> Partial:
    """One from several over the same queries and different keys, stacked on a leading axis."""
    maximum = partials.maximum.max(axis=0)
    weight = jnp.exp(partials.maximum - maximum)
    weighted = (partials.weighted * weight[..., None]).sum(axis=0)
    return Partial(maximum, (partials.total * weight).sum(axis=0), weighted)


def over_blocks(body: Callable[[Array, Partial], Partial], trips: Int[Array, ""], nothing: Partial) -> Partial:
    """``body(index, partial)`` for every index below ``trips``, even and odd ones in two independent chains.

    One chain alone leaves half of a CPU idle: each of its small operations waits for the one before.
    """

    def pair(index, chains):
        return body(2 * index, chains[0]), body(2 * index + 1, chains[1])

    even, odd = jax.lax.fori_loop(0, trips // 2, pair, (nothing, nothing))
    even = jax.lax.fori_loop(trips // 2 * 2, trips, body, even)
    return merge(jax.tree.map(lambda *x: jnp.stack(x), even, odd))


def finish(partial: Partial) -> Float[Array, "B K Q D"]:
    """The attended values; zero where nothing was visible."""
    return partial.weighted / jnp.maximum(partial.total, 1e-30)[..., None]


def group_queries(q: Float[Array, "B T H D"], kv_heads: int) -> Float[Array, "B K Q D"]:
    """All queries that share a key head side by side, Q = G * T with T fastest."""
    rows, tokens, heads, size = q.shape
    grouped = q.reshape(rows, tokens, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(rows, kv_heads, -1, size)


def ungroup_queries(x: Float[Array, "B K Q D"], tokens: int) -> Float[Array, "B T H D"]:
    """The inverse of ``group_queries``."""
    rows, kv_heads, _, size = x.shape
    return x.reshape(rows, kv_heads, -1, tokens, size).transpose(0, 3, 1, 2, 4).reshape(rows, tokens, -1, size)
