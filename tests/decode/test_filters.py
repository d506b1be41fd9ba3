"""A filter that is off is off exactly, whatever the other rows of the batch ask for."""

import jax
import jax.numpy as jnp
import numpy as np

from wmtp_jax.decode.sampling import _filter, batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams


def test_a_row_without_filters_keeps_its_whole_tail_beside_filtered_rows():
    logits = jnp.asarray(4 * np.random.default_rng(0).standard_normal((3, 50_000)), jnp.float32)
    rows = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=7)]
    sampling = batch_sampling([*rows, SamplingParams(temperature=1.0, top_p=0.5)])
    kept = np.asarray(jax.jit(_filter)(sampling, logits))
    np.testing.assert_array_equal(kept[0], logits[0])
    assert np.isfinite(kept[1]).sum() == 7
    assert 1 <= np.isfinite(kept[2]).sum() < 50_000
