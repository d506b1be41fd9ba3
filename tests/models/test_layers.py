"""Products take the way that is fastest on the machine, and are the same products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wmtp_jax.models import layers
from wmtp_jax.models.layers import Linear, float32_product


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


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("size_in", "size_out"), [(1, 3), (24, 5), (576, 192), (130, 1537)])
@pytest.mark.parametrize("shape", [(), (1, 1), (2,), (3, 5), (1, 9)])
def test_bfloat16_products_are_summed_in_float32(size_in, size_out, axis, shape):
    rng = np.random.default_rng(size_in)
    x = jnp.asarray(rng.standard_normal((*shape, size_in)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((size_in, size_out)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    found = jax.jit(float32_product, static_argnums=2)(x, kernel.T if axis else kernel, axis)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=3e-6 * size_in**0.5, rtol=1e-5)


@pytest.mark.parametrize(("size_in", "size_out"), [(24, 5), (576, 192), (130, 1537)])
def test_a_bfloat16_vector_gives_the_same_bits_whatever_is_beside_it(size_in, size_out):
    linear = Linear(size_in, size_out, rngs=nnx.Rngs(3), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 9, size_in)).astype(jnp.bfloat16)
    apply = jax.jit(lambda m, x: m(x))
    whole = np.asarray(apply(linear, x).astype(jnp.float32))
    for count in range(1, 9):
        np.testing.assert_array_equal(apply(linear, x[:, :count]).astype(jnp.float32), whole[:, :count])
