"""What recurrent blocks share: a float32 memory and a convolution tail, and runs that wait to be committed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.replay import Replay, commit


class RecurrentState(NamedTuple):
    """State of one block (leading axes are free): float32 memory and the convolution's last inputs."""

    memory: Float[Array, "*B H dk dv"]
    tail: Float[Array, "*B kernel-1 C"]


class RecurrentRun(NamedTuple):
    """A run of tokens that has been computed but not committed."""

    replay: Replay
    conv_inputs: Float[Array, "*B kernel-1+T C"]


def commit_run(state: RecurrentState, run: RecurrentRun, accepted: Int[Array, " *B"]) -> RecurrentState:
    """The state after the first ``accepted`` tokens of a run: memory and convolution tail move together."""
    tail = convolution_tail(run.conv_inputs, accepted, state.tail.shape[-2])
    return RecurrentState(commit(state.memory, run.replay, accepted), tail)


def convolution_tail(
    inputs: Float[Array, "*B kernel-1+T C"], accepted: Int[Array, " *B"], width: int
) -> Float[Array, "*B kernel-1 C"]:
    """The last ``width`` inputs after ``accepted`` of T tokens that follow a tail."""
    rows = accepted[..., None] + jnp.arange(width)
    return jnp.take_along_axis(inputs, rows[..., None], axis=-2)


def convolve(
    inputs: Float[Array, "B kernel-1+T C"], kernel: Float[Array, "kernel C"], bias: Float[Array, " C"] | None
) -> Float[Array, "B T C"]:
    """Causal depthwise convolution and SiLU in float32; ``inputs`` begin with the tail before the run."""
    kernel, x = kernel.astype(jnp.float32), inputs.astype(jnp.float32)
    width, tokens = kernel.shape[0], inputs.shape[1] - kernel.shape[0] + 1
    y = sum(x[:, i : i + tokens] * kernel[i] for i in range(width))
    return jax.nn.silu(y if bias is None else y + bias.astype(jnp.float32))
