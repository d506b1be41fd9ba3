"""Products of one vector, which a CPU splits, are the same products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wmtp_jax.models import layers
from wmtp_jax.models.layers import Linear


@pytest.mark.parametrize("cores", [1, 2, 6, 8])
@pytest.mark.parametrize("shape", [(8,), (1, 1, 24), (1, 7), (1, 1, 1), (3, 24), (1, 2, 12)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_is_the_product_whatever_the_cores(monkeypatch, cores, shape, bias):
    monkeypatch.setattr(layers, "_CORES", cores)
    linear = Linear(shape[-1], 5, bias=bias, rngs=nnx.Rngs(0), dtype=jnp.float32)
    if bias:
        linear.bias[...] = jnp.arange(5.0)
    x = jax.random.normal(jax.random.key(1), shape)
    expected = np.asarray(x, np.float64) @ np.asarray(linear.kernel[...], np.float64)
    found = jax.jit(lambda m, x: m(x))(linear, x)
    np.testing.assert_allclose(found, expected + (np.arange(5) if bias else 0), atol=1e-5)
    assert found.shape == (*shape[:-1], 5)
