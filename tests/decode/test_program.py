"""The compiled loop: caches updated in place, one program for all requests of a shape, no state that outlives its use.

What these claims cover of what goes wrong in speculative decoders: steps whose cost grows with the cache instead of
the text, recompilation while text is generated, and state of an earlier call that leaks into a later one.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiling import AS_INSTALLED
from tests.decode.driving import SHAPES, Batch, Request, Shape, append, batches, prefilled, run
from tests.tiny import CONFIGS
from wmtp_jax.decode import prefill as prefill_module
from wmtp_jax.decode.drafter import Drafter, MTPDrafter, Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.generation.options import CACHE_DTYPES
from wmtp_jax.models.decoder import abstract
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow
ROWS, CHUNK = 2, 16


@pytest.mark.parametrize("what", ["decode", "read a chunk"])
@pytest.mark.parametrize("drafter", [Plain(), MTPDrafter(gamma=2), MTPDrafter(gamma=3, window=500, sink=4)], ids=str)
def test_caches_are_updated_in_place(drafter, what):
    """With a pool that dwarfs all else, no operation but the stores makes an array of the size of any cache."""
    _check_updates_in_place(drafter, what, "float32", "float32")


@pytest.mark.parametrize("drafter", [MTPDrafter(gamma=2), MTPDrafter(gamma=3, window=500, sink=4)], ids=str)
@pytest.mark.parametrize(
    ("weights", "cached"), [("bfloat16", "bfloat16"), *(("float32", dtype) for dtype in CACHE_DTYPES[1:])]
)
def test_caches_of_narrow_numbers_are_too(drafter, weights, cached):
    _check_updates_in_place(drafter, "decode", weights, cached)


def _check_updates_in_place(drafter: Drafter, what: str, weights: str, cached: str) -> None:
    state = _big_state(drafter, weights, cached)
    sampling, stops = batch_sampling([SamplingParams()] * ROWS), jnp.full((ROWS, 1), -1)
    model = abstract(CONFIGS["hybrid"], jnp.dtype(weights))
    if what == "decode":
        program = decode.lower(pack(model), drafter, state, sampling, stops, 3).compile(AS_INSTALLED)
    else:
        tokens, counts = np.zeros((ROWS, CHUNK), np.int32), np.zeros(ROWS, np.int32)
        program = prefill_module.read_chunk.lower(model, drafter, state, tokens, tokens, counts, counts).compile(
            AS_INSTALLED
        )

    pool, ring = state.cache.keys, [] if state.draft is None else [state.draft.keys]
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * sum(cache.nbytes for cache in [pool, *ring])
    # A copy would be all of it; blocks cut out for attention, as float32, are some.
    assert memory.temp_size_in_bytes < 4 * pool.size // 2
    assert set(_operations_of_size(program.as_text(), pool.shape)) == {"scatter"}
    for cache in ring:
        # A window's small ring is read whole, which of narrow numbers makes a wide copy.
        read = {"convert", "bitcast-convert"} if getattr(drafter, "window", 0) and cached != "float32" else set()
        assert {"scatter"} <= set(_operations_of_size(program.as_text(), cache.shape)) <= {"scatter"} | read


def _big_state(drafter: Drafter, weights: str, cached: str) -> DecodeState:
    return start_state(
        abstract(CONFIGS["hybrid"], jnp.dtype(weights)), drafter, [[1]] * ROWS, [30_000] * ROWS,
        page_size=64, dtype=jnp.dtype(cached), penalized=False,
    )  # fmt: skip


def _operations_of_size(program: str, shape: tuple[int, ...]) -> list[str]:
    """Names of the operations whose result has as many elements, those that touch no memory left out."""
    found = []
    for dims, name in re.findall(r" = \w+\[([\d,]+)\]\S* ([\w-]+)\(", program):
        free = ("parameter", "get-tuple-element", "bitcast", "fusion")
        if np.prod([int(dim) for dim in dims.split(",")]) == np.prod(shape) and name not in free:
            found.append(name)
    return found


def test_this_would_notice_a_copy_of_the_cache():
    cache = jnp.zeros((300, 2, 64, 10))

    def double_use(cache):
        return cache.at[3].set(1.0), cache

    program = jax.jit(double_use, donate_argnums=0).lower(cache).compile(AS_INSTALLED)
    assert "copy" in _operations_of_size(program.as_text(), cache.shape)


@given(data=st.data(), weights=st.integers(0, 99))
@settings(max_examples=5)
def test_many_calls_of_one_step_are_one_call_of_many(data, weights):
    shape = SHAPES[0]
    model, batch = shape.make(weights), data.draw(batches(shape))
    expected = run(model, shape.windowed, batch)
    state = prefilled(model, shape.windowed, batch)
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    accepted = np.zeros(shape.gamma + 1, int)
    while not bool(jnp.all(state.done)):
        state, emitted = decode(packed, shape.windowed, state, batch.sampling, batch.stops, 7)
        append(texts, emitted)
        accepted += np.asarray(emitted.accepted)
    assert texts == expected.texts
    assert accepted.tolist() == expected.accepted.tolist()
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_donated_state_is_gone_and_a_new_one_knows_nothing_of_it():
    shape = SHAPES[0]
    model, batch = shape.make(3), _some_batch(shape, 3)
    first = prefilled(model, shape.windowed, batch)
    once, emitted = decode(pack(model), shape.windowed, first, batch.sampling, batch.stops, 1)
    assert first.cache.keys.is_deleted()
    assert first.draft.keys.is_deleted()
    run(model, shape.windowed, _some_batch(shape, 4))
    again = prefilled(model, shape.windowed, batch)
    twice, emitted_again = decode(pack(model), shape.windowed, again, batch.sampling, batch.stops, 1)
    for one, other in zip(jax.tree.leaves((once, emitted)), jax.tree.leaves((twice, emitted_again)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_is_compiled_for_another_request_of_the_same_shape():
    shape = SHAPES[4]
    run(shape.make(0), shape.windowed, _some_batch(shape, 0))
    programs = (decode, prefill_module.read_chunk, prefill_module.first_token)
    before = [program._cache_size() for program in programs]
    for seed in (1, 2, 3):
        run(shape.make(seed), shape.windowed, _some_batch(shape, seed))
    assert [program._cache_size() for program in programs] == before


def test_finished_rows_change_no_more():
    """A row with a limit of one token keeps its state through all the steps that the others take."""
    shape = SHAPES[0]
    model, batch = shape.make(5), _some_batch(shape, 5)
    batch = replace(batch, requests=[batch.requests[0]._replace(limit=1), *batch.requests[1:]])
    before = prefilled(model, shape.windowed, batch)
    kept = jax.tree.map(np.asarray, (before.recurrent, before.length, before.pending, before.cache.keys))
    table = np.asarray(before.cache.table)[0]
    after = run(model, shape.windowed, batch).state
    for one, other in zip(jax.tree.leaves(kept[0]), jax.tree.leaves(after.recurrent), strict=True):
        np.testing.assert_array_equal(one[:, 0], np.asarray(other)[:, 0])
    assert (int(after.length[0]), int(after.pending[0])) == (kept[1][0], kept[2][0])
    pages = np.concatenate([table + layer * before.cache.pages for layer in range(2)])
    np.testing.assert_array_equal(kept[3][pages], np.asarray(after.cache.keys)[pages])


def _some_batch(shape: Shape, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(
        shape,
        [
            Request(rng.integers(0, shape.vocab, rng.integers(1, 40)).tolist(), 12 + 3 * row, -1, SamplingParams())
            for row in range(shape.rows)
        ],
    )
