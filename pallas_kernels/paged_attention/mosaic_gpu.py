"""Pallas Mosaic GPU (Hopper): flash-decoding over pages; as many tiles as each row truly has, read page by page."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu.plan import KEYS
from pallas_kernels.mosaic_gpu.split_attention import split_attention


def paged_attention(
    q, k_pages, v_pages, page_table, lengths, k_scales=None, v_scales=None, *, splits=None, interpret: Any = None
):
    tokens, (kv_heads, page) = q.shape[1], k_pages.shape[1:3]
    if page % KEYS:
        raise UnsupportedKernel(
            f"paged_attention: mosaic_gpu takes pages of a multiple of {KEYS} tokens and got {page}"
        )
    last = jnp.tile(lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32), (1, q.shape[2] // kv_heads))
    out = split_attention(
        "paged_attention",
        online_softmax.group_queries(q, kv_heads),
        k_pages,
        v_pages,
        page_table,
        last,
        k_scales=k_scales,
        v_scales=v_scales,
        splits=splits,
        interpret=interpret,
    )
    return online_softmax.ungroup_queries(out, tokens).astype(q.dtype)
