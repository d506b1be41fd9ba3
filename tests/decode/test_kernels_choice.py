"""Which kernels run is the caller's choice, reaches every operation, and changes no text."""

import jax
import pytest

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.errors import UnsupportedKernel
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.generation.stream import generate
from wmtp_jax.model import Model, load
from wmtp_jax.models.decoder import with_kernels

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]


def text(kernels: str | None) -> list[list[int]]:
    decoder = with_kernels(tiny_model("hybrid", 7), kernels)
    model = Model(decoder=decoder, config=CONFIGS["hybrid"])
    return generate(model, PROMPTS, max_new_tokens=12, gamma=2, window=4, sink=2, page_size=8).tokens


def test_the_reference_kernels_write_the_same_text():
    assert text("reference") == text(None) == text("xla")


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name.startswith("mosaic")])
def test_kernels_of_another_machine_are_refused_when_loading_and_when_running(name):
    with pytest.raises(
        UnsupportedKernel, match=rf"'{name}' need a .PU and JAX found a {jax.default_backend().upper()}"
    ):
        load(kernels=name)
    with pytest.raises(UnsupportedKernel, match=name):
        text(name)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedKernel, match="'cuda' do not exist: take one of"):
        load(kernels="cuda")
