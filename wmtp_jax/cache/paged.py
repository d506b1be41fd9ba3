"""The target's keys and values: one pool of pages for all layers and rows, and a table that says who owns which."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.bit_patterns import as_bits, as_floats, float_dtype
from pallas_kernels.paged_attention import paged_attention
from wmtp_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Row b's position p lies in page ``table[b, p // P]`` of every layer.

    The pool is flat, R = layers * ``pages``: layer l's page i is pool page ``l * pages + i``. A separate layer axis
    would have to be reshaped away for attention, and XLA then copies the pool at every write. The dtype is that of
    ``bit_patterns.as_bits``.
    """

    keys: Float[Array, "R K P D"]
    values: Float[Array, "R K P D"]
    table: Int[Array, "B n"]
    pages: int = field(metadata={"static": True})
    kernels: str | None = field(default=None, metadata={"static": True})
    # Of eight-bit pages, one a position and head; None where pages hold what they mean.
    key_scales: Float[Array, "R K P"] | None = None
    value_scales: Float[Array, "R K P"] | None = None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def attend(
        self,
        layer: Int[Array, ""],
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        lengths: Int[Array, " B"],
        valid: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T H D"], "PagedCache"]:
        """Stores T new positions after ``lengths`` (those that are ``valid``), then attends over everything."""
        positions = lengths[:, None] + jnp.arange(q.shape[1])
        table = self.table + layer * self.pages
        own = jnp.minimum(positions // self.page_size, table.shape[1] - 1)
        # An index past the pool is dropped by the scatter: padded tokens and finished rows write nowhere.
        page = jnp.where(valid, jnp.take_along_axis(table, own, axis=1), self.keys.shape[0])
        # All indexed axes together and in order: a slice between them would make some backends transpose the pool.
        heads = jnp.arange(self.keys.shape[1])
        at = (page[..., None], heads, (positions % self.page_size)[..., None])
        keys, key_scales = _store(self.keys, self.key_scales, at, k)
        values, value_scales = _store(self.values, self.value_scales, at, v)
        stored = replace(self, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)
        return stored.read(layer, q, lengths), stored

    def read(
        self, layer: Int[Array, ""], q: Float[Array, "B T H D"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B T H D"]:
        """Attention of the T positions after ``lengths``, whose keys are already stored, over all up to themselves."""
        return paged_attention(
            q,
            as_floats(self.keys),
            as_floats(self.values),
            self.table + layer * self.pages,
            lengths,
            k_scales=self.key_scales,
            v_scales=self.value_scales,
            implementation=self.kernels,
        )


def _store(pages: Array, scales: Array | None, at: tuple, new: Float[Array, "B T K D"]) -> tuple[Array, Array | None]:
    """Pages and scales with new entries."""
    if scales is not None:
        new, scale = quantize(new, float_dtype(pages))
        scales = scales.at[at].set(scale, mode="drop")
    return pages.at[at].set(as_bits(new.astype(float_dtype(pages))), mode="drop"), scales


def quantize(x: Float[Array, "*B D"], dtype: DTypeLike) -> tuple[Array, Float[Array, "*B"]]:
    """Vectors as eight-bit numbers, and the scale of each, with which its largest number just fits."""
    dtype = jnp.dtype(dtype)
    largest = float(jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / largest
    scaled = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None]
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


def default_page_size(positions: int) -> int:
    """Positions a page for rows of up to so many.

    A CPU reads long contexts fastest in long pages, too coarse for short ones; one long row decides for all rows of its
    batch. Elsewhere 256, which the device kernels take.
    """
    if jax.default_backend() != "cpu" or positions <= 2048:
        return 256
    return 2048 if positions <= 8192 else 4096


def allocate(
    config: ModelConfig, capacities: list[int], page_size: int, dtype: DTypeLike, kernels: str | None = None
) -> PagedCache:
    """An empty pool in which row b owns enough pages for ``capacities[b]`` positions."""
    counts = [-(-capacity // page_size) for capacity in capacities]
    starts = np.concatenate([[0], np.cumsum(counts)])
    # Entries past a row's own pages are never written and only read masked; they repeat its last page.
    table = np.stack(
        [start + np.minimum(np.arange(max(counts)), count - 1) for start, count in zip(starts, counts, strict=False)]
    )
    a = config.attention
    pages = int(starts[-1])
    shape = (config.count("attention") * pages, a.num_kv_heads, page_size, a.head_dim)
    scales = [jnp.zeros(shape[:-1]) if jnp.dtype(dtype).itemsize == 1 else None for _ in range(2)]
    keys, values = (as_bits(jnp.zeros(shape, dtype)) for _ in range(2))
    return PagedCache(keys, values, jnp.asarray(table, jnp.int32), pages, kernels, *scales)
