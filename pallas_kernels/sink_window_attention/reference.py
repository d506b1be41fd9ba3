"""Put every slot back to its absolute position in a full cache, mask, softmax: the oracle."""

import jax
import jax.numpy as jnp

from pallas_kernels.sink_window_attention.slots import ring_positions


def sink_window_attention(q, k_ring, v_ring, positions, window_start, sink):
    heads, kv_heads, capacity = q.shape[2], k_ring.shape[1], k_ring.shape[2]
    held = ring_positions(jnp.max(positions, axis=1), sink, capacity)[:, None, :]
    visible = (held >= 0) & (held <= positions[..., None]) & ((held < sink) | (held >= window_start[..., None]))
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // kv_heads, axis=1) for x in (k_ring, v_ring))
    scores = jnp.einsum("bthd,bhcd->bhtc", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhtc,bhcd->bthd", weights, v).astype(q.dtype)
