"""The Multi-Token-Prediction draft head (DeepSeek-V3, arXiv 2412.19437, section 2.2, in the Qwen3-Next arrangement).

Draft entry i is made from the target's hidden state h_i *after its final norm* and the embedding of x_{i+1}. One
attention layer later the head predicts x_{i+2} through the target's own output head. Used recurrently, the head is fed
its own normed output and its own token. Its keys and values depend only on the entry, never on its own attention. No
head has a recurrent block: what the backbone's recurrent layers remember of the text reaches it through h_i, and a
rejected draft leaves nothing to roll back but ring entries. Nemotron-3's head is the same, without positions.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.config import ModelConfig
from wmtp_jax.models.attention import Attention
from wmtp_jax.models.block import Block
from wmtp_jax.models.feed_forward import MoE, ReLU2, SwiGLU
from wmtp_jax.models.layers import Linear, RMSNorm


class MTP(nnx.Module):
    """Two pre-norms, a projection of [embedding, hidden], one attention layer with its feed-forward, a final norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        norm = (config.hidden_size, config.norm_eps, config.zero_centered_norm, dtype)
        self.embedding_norm = RMSNorm(*norm)
        self.hidden_norm = RMSNorm(*norm)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.blocks = nnx.List([Block(kind, config, rngs=rngs, dtype=dtype) for kind in config.mtp_pattern])
        self.norm = RMSNorm(*norm)

    def entries(self, hidden: Float[Array, "B T M"], embedding: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Draft entries from target hidden states and the embeddings of the tokens that follow them."""
        pair = jnp.concatenate([self.embedding_norm(embedding), self.hidden_norm(hidden)], axis=-1)
        return self.fc(pair)

    def keys_values(
        self, entries: Float[Array, "B T M"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """What the head's cache holds for these entries."""
        return self._attention.keys_values(self.blocks[0].norm(entries), positions)

    def outputs(
        self,
        entries: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        attend: Callable[[Float[Array, "B T H D"]], Float[Array, "B T H D"]],
    ) -> Float[Array, "B T M"]:
        """Normed outputs: what the output head reads and what the next recurrent step takes as hidden state."""
        q, gate = self._attention.queries(self.blocks[0].norm(entries), positions)
        x = entries + self._attention.output(attend(q), gate)
        for block in self.blocks[1:]:
            assert isinstance(block.mixer, SwiGLU | ReLU2 | MoE)
            x = x + block.mixer(block.norm(x))
        return self.norm(x)

    @property
    def _attention(self) -> Attention:
        mixer = self.blocks[0].mixer
        assert isinstance(mixer, Attention)
        return mixer
