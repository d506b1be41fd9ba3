"""Heads as a drafter: the text is the backbone's own, whatever they say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clp.backbones import with_random_heads
from tests.decode.driving import SHAPES, batches, run
from tests.decode.recompute import assert_same_texts
from tests.tiny import tiny_model
from wmtp_jax.clp.drafter import heads_drafter
from wmtp_jax.decode.drafter import Plain

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["parallel", "residual", "recurrent"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[5]], ids=str)
@given(data=st.data(), weights=st.integers(0, 99))
@settings(max_examples=4)
def test_text_is_the_same_whatever_the_heads(kind, shape, data, weights):
    vocab = {"parallel": shape.vocab // 2, "residual": 0, "recurrent": shape.vocab - 5}[kind]
    model = with_random_heads(shape.model, kind, shape.gamma, weights, draft_vocab=vocab, unrolled=shape.unrolled)
    batch = data.draw(batches(shape, stops=True))
    plain = run(tiny_model(shape.model, weights, unrolled=shape.unrolled), Plain(), batch)
    drafter = heads_drafter(model, shape.gamma, shape.window, shape.sink)
    assert_same_texts(model, batch, plain.texts, run(model, drafter, batch).texts, str(drafter))
