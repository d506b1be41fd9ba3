"""The recurrence as written, one token after another: the oracle."""

import jax
import jax.numpy as jnp


def gated_delta_rule(q, k, v, log_decay, beta, state):
    def step(s, token):
        q_t, k_t, v_t, g_t, beta_t = token
        s = jnp.exp(g_t)[..., None, None] * s
        u = beta_t[..., None] * (v_t - jnp.einsum("bhkv,bhk->bhv", s, k_t))
        s = s + jnp.einsum("bhk,bhv->bhkv", k_t, u)
        return s, (jnp.einsum("bhkv,bhk->bhv", s, q_t), u)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, beta))
    state, (out, u) = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state, jnp.moveaxis(u, 0, 1)
