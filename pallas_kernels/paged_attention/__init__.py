"""Causal attention of a run of tokens over everything a row has cached in pages: the target's attention."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from pallas_kernels.paged_attention import reference, xla

_IMPLEMENTATIONS = {"reference": reference.paged_attention, "xla": xla.paged_attention}


def paged_attention(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "R K P D"],
    v_pages: Float[Array, "R K P D"],
    page_table: Int[Array, "B n"],
    lengths: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Query t of row b attends to positions 0 .. lengths[b] + t; position p lies in page_table[b, p // P] at p % P.

    The run's own keys must already be in the pages. Scores and sums are float32, scaled by D^-1/2; the result has the
    dtype of ``q``. Work follows the longest true length of the batch, not the number of allocated pages.
    """
    return choose("paged_attention", _IMPLEMENTATIONS, implementation)(q, k_pages, v_pages, page_table, lengths)
