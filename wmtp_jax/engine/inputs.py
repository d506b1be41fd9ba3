"""What the slots' programs take for a batch of requests besides the state: sampling, stop tokens, allowed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from wmtp_jax.decode.loop import Emitted
from wmtp_jax.decode.sampling import Sampling, batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.engine.task import Gained, Task

_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Inputs:
    """Made for one model. Entries of a bucket past its requests sample greedily and never stop.

    One program serves ``plain`` rows alone and another all: a program for every mixture would be too many.
    """

    eos_ids: tuple[int, ...]
    vocab_size: int

    def sampling(self, tasks: Sequence[Task], bucket: int) -> Sampling:
        """The requests' own sampling."""
        return self.for_params([task.sampling for task in tasks], bucket, plain=all(task.plain for task in tasks))

    def for_params(self, rows: Sequence[SamplingParams], bucket: int, *, plain: bool) -> Sampling:
        """The same from parameters."""
        made = batch_sampling([*rows, *([_GREEDY] * (bucket - len(rows)))])
        if plain:
            return made
        return replace(made, stochastic=True, filtered=True, penalized=True, logprobs=True)

    def stops(self, tasks: Sequence[Task], bucket: int) -> np.ndarray:
        """Tokens [bucket, E] that end each row."""
        # No token has a negative id: ignored ends keep their shape, so that both ways share one program.
        none = np.full(max(1, len(self.eos_ids)), -1, np.int32)
        ends = np.array(self.eos_ids, np.int32) if self.eos_ids else none
        rows = [none if task.options.ignore_eos else ends for task in tasks]
        return np.stack(rows + [none] * (bucket - len(rows)))

    def first_allowed(self, *, plain: bool) -> np.ndarray | None:
        """What a first token may be, [W], where nothing binds it; the program for plain rows alone never asks."""
        return None if plain else self._all()

    def allowed(self, bucket: int, run: int) -> np.ndarray:
        """Every bit [bucket, run, W] set."""
        return np.tile(self._all(), (bucket, run, 1))

    def _all(self) -> np.ndarray:
        return np.full(-(-self.vocab_size // 32), 2**32 - 1, np.uint32)


def gained(emitted: Emitted, row: int, count: int) -> Gained:
    """One row's share, of ``count`` tokens."""
    likely = None if emitted.likely is None else jax.tree.map(lambda x: x[row], emitted.likely)
    return Gained(emitted.tokens[row, :count].tolist(), emitted.drafted[row, :count].tolist(), likely)
