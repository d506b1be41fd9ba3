"""The ops again in float64 numpy, one query and one token at a time, straight from their definitions."""

import numpy as np


def softmax_sum(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax-weighted sum of values [n, D] by scores [n]."""
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """One query [H, D] over keys and values [L, K, D] at the ``visible`` positions."""
    heads, size = q.shape
    groups = heads // keys.shape[1]
    out = np.zeros((heads, size))
    for head in range(heads):
        k, v = keys[visible, head // groups], values[visible, head // groups]
        out[head] = softmax_sum(k @ q[head] / np.sqrt(size), v)
    return out


def kept_positions(committed: int, newest: int, window: int, sink: int) -> np.ndarray:
    """What a draft at ``committed`` length reads when ``newest`` is its own position."""
    positions = np.arange(newest + 1)
    return positions[(positions < sink) | (positions >= committed - window)]


def delta_rule(q, k, v, log_decay, beta, state):
    """Outputs [T, dv] and the state after every token [T, dk, dv] of one head."""
    outputs, states = [], []
    for t in range(len(q)):
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        outputs.append(state.T @ q[t])
        states.append(state)
    return np.array(outputs), np.array(states)


def state_space(x, b, c, log_decay, state):
    """Outputs [T, P] and the state after every token [T, N, P] of one head."""
    outputs, states = [], []
    for t in range(len(x)):
        state = np.exp(log_decay[t]) * state + np.outer(b[t], x[t])
        outputs.append(state.T @ c[t])
        states.append(state)
    return np.array(outputs), np.array(states)
