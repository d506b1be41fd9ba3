"""What heads on a frozen backbone are made of."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from wmtp_jax.config import ConfigError
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder

MAX_HEADS = 8
# Of every array, for the fingerprint.
_VALUES = 8
Kind = Literal["parallel", "residual", "recurrent", "own"]
KINDS: tuple[Kind, ...] = ("parallel", "residual", "recurrent", "own")


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """``k`` heads of one kind for the backbone with that ``fingerprint``.

    - ``parallel``: from the hidden state h_t alone, Linear(M, M/2) - GELU - Linear(M/2, V) each (the paper's).
    - ``residual``: one residual layer each on h_t, then the backbone's own output head (Medusa's, arXiv 2401.10774).
    - ``recurrent``: one MTP layer used k times, which sees the token just chosen (FastMTP's, arXiv 2509.18362).
    - ``own``: the MTP head that the checkpoint brings; only the length predictor is trained.

    Head i writes token t + 2 + i; the backbone's head writes t + 1. With ``competing`` heads, head i writes t + 1 + i
    and the first of them stands in for the backbone's: the arrangement that the paper improves on. Heads choose among
    the ``draft_vocab`` tokens most frequent in their training text, 0 for all.
    """

    kind: Kind
    k: int
    hidden_size: int
    vocab_size: int
    fingerprint: str
    draft_vocab: int = 0
    competing: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if not isinstance(self.k, int) or not 1 <= self.k <= MAX_HEADS:
            raise ConfigError(f"k={self.k!r} must be a whole number from 1 to {MAX_HEADS}")
        if self.competing and self.is_mtp:
            raise ConfigError(
                f"competing heads read the hidden state alone, as parallel and residual ones: not {self.kind}"
            )
        if self.draft_vocab == 1 or not 0 <= self.draft_vocab <= self.vocab_size:
            raise ConfigError(
                f"draft_vocab={self.draft_vocab} must be 0, or from 2 to the vocabulary's {self.vocab_size}"
            )

    @property
    def is_mtp(self) -> bool:
        """Whether the head is an MTP layer with a cache of its own."""
        return self.kind in ("recurrent", "own")

    @property
    def drafts(self) -> int:
        """How many tokens after the backbone's own the heads write."""
        return self.k - 1 if self.competing else self.k

    @property
    def offset(self) -> int:
        """How far ahead of the hidden state's own position the first head writes."""
        return 1 if self.competing else 2

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "HeadsConfig":
        """Raises UserError for anything that ``to_json`` does not write."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise UserError(f"not a description of heads ({error})") from None


def fingerprint(model: Decoder) -> str:
    """Names a backbone by some values of every parameter, whatever dtype it is loaded in: heads fit no other."""
    digest = hashlib.sha256()
    parts = [model.embedding[...][:16], model.final_norm.weight[...]]
    if model.lm_head is not None:
        parts.append(model.lm_head.kernel[...][:4])
    for part in [*parts, *_of_blocks(model)]:
        digest.update(np.asarray(part.astype(jnp.bfloat16).view(jnp.uint16)).tobytes())
    return digest.hexdigest()[:16]


def _of_blocks(model: Decoder) -> Iterator[Array]:
    """The first values of every array of every block, period by period, stacked or not."""
    blocks = iter(model.blocks)
    for segment in model.config.segments:
        stacked = [] if model.unrolled else list(islice(blocks, len(segment.pattern)))
        for period in range(segment.num_periods):
            own = next(blocks) if model.unrolled else stacked
            for leaf in jax.tree.leaves(list(own)):
                yield (leaf if model.unrolled else leaf[period]).reshape(-1)[:_VALUES]
