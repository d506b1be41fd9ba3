"""How many bytes a generate run must hold, from shapes alone."""

from typing import Any

import jax

from wmtp_jax.bench.start import Footprint
from wmtp_jax.decode.prefill import start_state
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.generation.stream import make_drafter
from wmtp_jax.model import Model


def footprint(model: Model, prompt_tokens: int, **options: Any) -> Footprint:
    """Of one prompt of so many tokens; ``options`` are those of ``generate``. Allocates no cache."""
    given = GenerateOptions(**options)
    drafter = make_drafter(model, given)

    def start() -> Any:
        return start_state(
            model.decoder,
            drafter,
            [[0] * prompt_tokens],
            [given.max_new_tokens],
            page_size=given.page_size,
            dtype=given.cache_dtype or model.decoder.embedding.dtype,
            penalized=False,
        )

    state = jax.eval_shape(start)
    caches = (state.cache, state.recurrent, state.draft)
    return Footprint(weights_bytes=_bytes(model.decoder), caches_bytes=_bytes(caches))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
