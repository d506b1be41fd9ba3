"""The chunked form of state-space duality against one token at a time in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mamba2_ssd import commit, mamba2_ssd
from tests.kernels.oracles import state_space
from tests.kernels.shapes import STATE_SPACES, StateSpace

run = jax.jit(mamba2_ssd, static_argnames="implementation")
fold = jax.jit(commit)


def ssd_case(case: StateSpace, seed: int, *, decay: float = 1.0):
    """x, b, c, log decay and state; padded tokens write nothing and do not decay, and b and c are large there."""
    rng = np.random.default_rng(seed)
    rows, shape = len(case.valid), (len(case.valid), case.tokens)
    padded = np.arange(case.tokens) >= np.array(case.valid)[:, None]
    x = rng.standard_normal((*shape, case.heads, case.width))
    b, c = rng.standard_normal((2, *shape, case.groups, case.size)) / np.sqrt(case.size)
    log_decay = -decay * rng.uniform(0, 1, (*shape, case.heads))
    x[padded] = log_decay[padded] = 0.0
    b[padded] = c[padded] = 1e3
    return x, b, c, log_decay, rng.standard_normal((rows, case.heads, case.size, case.width))


def oracle(inputs):
    """Outputs [B T H P] and the state after every token [B T H N P]."""
    x, b, c, log_decay, state = inputs
    rows, _, heads = log_decay.shape
    group = np.arange(heads) // (heads // b.shape[2])
    parts = [
        [
            state_space(x[row, :, h], b[row, :, group[h]], c[row, :, group[h]], log_decay[row, :, h], state[row, h])
            for h in range(heads)
        ]
        for row in range(rows)
    ]
    return tuple(np.stack([np.stack([part[i] for part in row], axis=1) for row in parts]) for i in (0, 1))


def on_device(inputs):
    return [jnp.asarray(x, jnp.float32) for x in inputs]


def assert_follows(case: StateSpace, inputs, out, state):
    """Outputs of the valid tokens, and the state after all."""
    outputs, states = oracle(inputs)
    for row, valid in enumerate(case.valid):
        np.testing.assert_allclose(out[row, :valid], outputs[row, :valid], atol=2e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", STATE_SPACES)
def test_the_recurrence_is_followed_token_for_token(name, implementation):
    case = STATE_SPACES[name]
    inputs = ssd_case(case, seed=len(name))
    out, state, _ = run(*on_device(inputs), implementation=implementation)
    assert_follows(case, inputs, out, state)


@pytest.mark.parametrize("name", ["longest verified run", "one chunk", "several chunks"])
def test_strong_decay_neither_overflows_nor_leaks(name):
    """Nor does it cost the digits of what weak decay keeps in between."""
    case = STATE_SPACES[name]
    inputs = ssd_case(case, seed=5, decay=200.0)
    inputs[3][:, ::2] /= 200.0
    out, state, replay = run(*on_device(inputs))
    assert_follows(case, inputs, out, state)
    folded = fold(jnp.asarray(inputs[-1], jnp.float32), replay, jnp.full(len(case.valid), case.tokens))
    np.testing.assert_allclose(folded, oracle(inputs)[1][:, -1], atol=2e-5)


def test_decay_beyond_every_number_only_forgets():
    case = STATE_SPACES["one past a chunk"]
    inputs = ssd_case(case, seed=6, decay=1e6)
    out, state, _ = run(*on_device(inputs))
    assert_follows(case, inputs, out, state)


@partial(jax.jit, static_argnums=0)
@partial(jax.grad, argnums=(1, 2, 3, 4, 5))
def gradients(implementation, *inputs):
    out, state, _ = mamba2_ssd(*inputs, implementation=implementation)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state))


@pytest.mark.parametrize("decay", [1.0, 200.0])
@pytest.mark.parametrize("tokens", [5, 66])
def test_gradients_are_those_of_the_recurrence(tokens, decay):
    """In every argument, through the short form and the chunked one; under strong decay, finite in the first place."""
    inputs = on_device(ssd_case(StateSpace((tokens,), tokens, 4, 2, 4, 8), seed=7, decay=decay))
    for got, expected in zip(gradients("xla", *inputs), gradients("reference", *inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["one token", "verified run", "longest verified run", "one past a chunk"])
def test_committing_a_prefix_equals_never_having_seen_the_rest(name):
    case = STATE_SPACES[name]
    inputs = ssd_case(case, seed=8)
    _, states = oracle(inputs)
    _, _, replay = run(*on_device(inputs))
    begin = jnp.asarray(inputs[-1], jnp.float32)
    for accepted in range(case.tokens + 1):
        folded = fold(begin, replay, jnp.full(len(case.valid), accepted))
        expected = states[:, accepted - 1] if accepted else inputs[-1]
        np.testing.assert_allclose(folded, expected, atol=2e-5, err_msg=f"{accepted} accepted")


def test_rows_commit_different_prefixes_and_layers_stack():
    """And values of tokens that are not accepted may be anything."""
    inputs = ssd_case(StateSpace((9, 9), 9, 6, 3, 4, 8), seed=9)
    _, states = oracle(inputs)
    _, _, replay = run(*on_device(inputs))
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), replay)
    accepted = jnp.asarray([[2, 9], [5, 0]])
    rejected = jnp.arange(9) >= accepted[..., None]
    values = jnp.where(rejected[..., None, None], jnp.nan, stacked.values)
    begin = jnp.stack([jnp.asarray(inputs[-1], jnp.float32)] * 2)
    folded = fold(begin, stacked._replace(values=values), accepted)
    np.testing.assert_allclose(folded[0, 0], states[0, 1], atol=2e-5)
    np.testing.assert_allclose(folded[0, 1], states[1, 8], atol=2e-5)
    np.testing.assert_allclose(folded[1, 0], states[0, 4], atol=2e-5)
    np.testing.assert_array_equal(folded[1, 1], inputs[-1][1].astype(np.float32))


@pytest.mark.parametrize("name", ["verified run", "several chunks"])
def test_padded_tokens_leave_the_state_bit_for_bit(name):
    x, b, c, log_decay, state = on_device(ssd_case(STATE_SPACES[name], seed=10))
    _, after, _ = run(jnp.zeros_like(x), b, c, jnp.zeros_like(log_decay), state)
    np.testing.assert_array_equal(after, state)
