"""The TPU kernels through the compiler for real chips, which needs no chip: `pip install libtpu` of JAX's version."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.gated_delta_rule.mosaic_tpu import gated_delta_rule
from pallas_kernels.mamba2_ssd.mosaic_tpu import mamba2_ssd
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention
from pallas_kernels.sink_window_attention.mosaic_tpu import sink_window_attention
from tests.kernels.test_mosaic_tpu import paged_shapes, ssd_shapes

pytest.importorskip("libtpu", reason="libtpu is the compiler for TPUs; it is not among the test requirements")
pytestmark = pytest.mark.slow


@pytest.fixture(params=["v5e:2x2", "v6e:2x2"], scope="module")
def chip(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        yield SingleDeviceSharding(topologies.get_topology_desc(request.param, platform="tpu").devices[0])


def compiled(kernel, chip, *shapes):
    at_chip = [Shape(x.shape, x.dtype, sharding=chip) for x in shapes]
    return jax.jit(kernel, out_shardings=chip).lower(*at_chip).compile().as_text()


@pytest.mark.parametrize("tokens", [7, 512])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_paged_attention_reads_the_pages_where_they_lie(kind, tokens, chip):
    shapes = paged_shapes(kind, tokens, 128)
    text = compiled(paged_attention, chip, *shapes)
    assert "tpu_custom_call" in text
    pool = ",".join(str(n) for n in shapes[1].shape)
    assert re.search(rf"\[{pool}\]\S* parameter\(", text)
    assert not re.search(rf"\[{pool}\]\S* (copy|transpose|fusion)\(", text)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("capacity", "sink"), [(64 + 4032 + 6, 64), (131072, 0), (200, 5)])
def test_sink_window_attention_compiles(capacity, sink, tokens, chip):
    ring, at = Shape((2, 2, capacity, 256), jnp.bfloat16), Shape((2, tokens), jnp.int32)
    shapes = (Shape((2, tokens, 16, 256), jnp.bfloat16), ring, ring, at, at)
    assert "tpu_custom_call" in compiled(partial(sink_window_attention, sink=sink), chip, *shapes)


@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_the_gated_delta_rule_compiles(tokens, chip):
    vectors, gate = Shape((2, tokens, 32, 128), jnp.float32), Shape((2, tokens, 32), jnp.float32)
    state = Shape((2, 32, 128, 128), jnp.float32)
    assert "tpu_custom_call" in compiled(gated_delta_rule, chip, vectors, vectors, vectors, gate, gate, state)


@pytest.mark.parametrize(("tokens", "groups"), [(1, 8), (9, 128), (512, 8)])
def test_state_space_duality_compiles(tokens, groups, chip):
    assert "tpu_custom_call" in compiled(mamba2_ssd, chip, *ssd_shapes(tokens, groups=groups))
