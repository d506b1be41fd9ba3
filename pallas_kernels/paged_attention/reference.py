"""Gather every page, mask, softmax: the oracle."""

import jax
import jax.numpy as jnp


def paged_attention(q, k_pages, v_pages, page_table, lengths, k_scales=None, v_scales=None):
    rows, tokens, heads, size = q.shape
    k_pages, v_pages = _scaled(k_pages, k_scales), _scaled(v_pages, v_scales)
    k, v = (
        jnp.moveaxis(pages[page_table], 2, 1).reshape(rows, pages.shape[1], -1, size) for pages in (k_pages, v_pages)
    )
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bthd,bhpd->bhtp", q.astype(jnp.float32), k) * size**-0.5
    last = lengths[:, None] + jnp.arange(tokens)
    visible = jnp.arange(k.shape[2]) <= last[:, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhtp,bhpd->bthd", weights, v).astype(q.dtype)


def _scaled(pages, scales):
    pages = pages.astype(jnp.float32)
    return pages if scales is None else pages * scales[..., None]
