"""Causal attention of a run of tokens over everything a row has cached in pages: the target's attention."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose


def paged_attention(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "R K P D"],
    v_pages: Float[Array, "R K P D"],
    page_table: Int[Array, "B n"],
    lengths: Int[Array, " B"],
    *,
    k_scales: Float[Array, "R K P"] | None = None,
    v_scales: Float[Array, "R K P"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Query t of row b attends to positions 0 .. lengths[b] + t; position p lies in page_table[b, p // P] at p % P.

    The run's own keys must already be in the pages. Pages of int8 or float8_e4m3fn come with float32 scales, one a
    position and key head: the key meant is ``k_pages * k_scales[..., None]``. Scores and sums are float32, scaled by
    D^-1/2; the result has the dtype of ``q``. Work follows the longest true length of the batch, not the number of
    allocated pages.
    """
    attend = choose("paged_attention", implementation)
    return attend(q, k_pages, v_pages, page_table, lengths, k_scales, v_scales)
