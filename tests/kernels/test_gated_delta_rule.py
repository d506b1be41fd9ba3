"""The chunked gated delta rule against one token at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import commit, gated_delta_rule
from tests.kernels.oracles import delta_rule
from tests.kernels.shapes import DELTAS, Delta

run = jax.jit(gated_delta_rule, static_argnames="implementation")


def delta_case(case: Delta, seed: int, *, parallel_keys: bool = False, decay: float = 1.0):
    rng = np.random.default_rng(seed)
    shape = (case.rows, case.tokens, case.heads)
    q, k = rng.standard_normal((2, *shape, case.key_dim))
    if parallel_keys:
        k = np.ones_like(k) + 1e-3 * k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((*shape, case.value_dim))
    log_decay = -decay * rng.uniform(0, 1, shape)
    beta = rng.uniform(0.9, 1.0, shape) if parallel_keys else rng.uniform(0, 1, shape)
    state = rng.standard_normal((case.rows, case.heads, case.key_dim, case.value_dim))
    return q, k, v, log_decay, beta, state


def oracle(inputs):
    q, k, v, log_decay, beta, state = inputs
    rows, _, heads = log_decay.shape
    parts = [
        [delta_rule(*(x[b, :, h] for x in (q, k, v, log_decay, beta)), state[b, h]) for h in range(heads)]
        for b in range(rows)
    ]
    out = np.stack([np.stack([o for o, _ in row], axis=1) for row in parts])
    states = np.stack([np.stack([s for _, s in row], axis=1) for row in parts])
    return out, states


def on_device(inputs):
    return [jnp.asarray(x, jnp.float32) for x in inputs]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", DELTAS)
def test_the_recurrence_is_followed_token_for_token(name, implementation):
    inputs = delta_case(DELTAS[name], seed=len(name))
    out, state, _ = run(*on_device(inputs), implementation=implementation)
    expected, states = oracle(inputs)
    np.testing.assert_allclose(out, expected, atol=5e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-5)


@pytest.mark.parametrize("name", ["longest verified run", "one chunk", "several chunks"])
def test_repetitive_text_keeps_its_digits(name):
    inputs = delta_case(DELTAS[name], seed=3, parallel_keys=True, decay=0.01)
    out, state, _ = run(*on_device(inputs))
    expected, states = oracle(inputs)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out, expected, atol=2e-5 * scale)
    np.testing.assert_allclose(state, states[:, -1], atol=2e-5 * np.abs(states).max())


def test_strong_decay_neither_overflows_nor_leaks():
    inputs = delta_case(DELTAS["one chunk"], seed=5, decay=200.0)
    out, state, replay = run(*on_device(inputs))
    expected, states = oracle(inputs)
    np.testing.assert_allclose(out, expected, atol=5e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-5)
    folded = commit(jnp.asarray(inputs[-1], jnp.float32), replay, jnp.asarray([64, 30]))
    np.testing.assert_allclose(folded[1], states[1, 29], atol=5e-5)


def test_gradients_stay_finite_under_strong_decay():
    inputs = on_device(delta_case(DELTAS["one chunk"], seed=6, decay=200.0))
    gradient = jax.jit(jax.grad(lambda *x: gated_delta_rule(*x)[0].sum(), argnums=(0, 1, 2, 3, 4, 5)))
    gradients = gradient(*inputs)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize("name", ["one token", "verified run", "longest verified run", "one past a chunk"])
def test_committing_a_prefix_equals_never_having_seen_the_rest(name):
    case = DELTAS[name]
    inputs = delta_case(case, seed=7)
    _, states = oracle(inputs)
    _, _, replay = run(*on_device(inputs))
    begin = jnp.asarray(inputs[-1], jnp.float32)
    for accepted in {0, 1, case.tokens // 2, case.tokens - 1, case.tokens}:
        folded = commit(begin, replay, jnp.full(case.rows, accepted))
        expected = states[:, accepted - 1] if accepted else inputs[-1]
        np.testing.assert_allclose(folded, expected, atol=5e-5, err_msg=f"{accepted} accepted")


def test_rows_commit_different_prefixes_and_layers_stack():
    inputs = delta_case(DELTAS["longest verified run"], seed=8)
    _, states = oracle(inputs)
    _, _, replay = run(*on_device(inputs))
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), replay)
    begin = jnp.stack([jnp.asarray(inputs[-1], jnp.float32)] * 2)
    folded = commit(begin, stacked, jnp.asarray([[2, 9], [5, 0]]))
    np.testing.assert_allclose(folded[0, 0], states[0, 1], atol=5e-5)
    np.testing.assert_allclose(folded[0, 1], states[1, 8], atol=5e-5)
    np.testing.assert_allclose(folded[1, 0], states[0, 4], atol=5e-5)
    np.testing.assert_array_equal(folded[1, 1], inputs[-1][1].astype(np.float32))


def test_padded_tokens_leave_the_state_bit_for_bit():
    q, k, v, _, beta, state = on_device(delta_case(DELTAS["verified run"], seed=9))
    zero = jnp.zeros_like(beta)
    _, after, _ = run(q, k, v, zero, zero, state)
    np.testing.assert_array_equal(after, state)
