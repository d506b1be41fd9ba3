"""Compiles an engine's programs before its first request, by running each with nobody in it."""

from dataclasses import dataclass

import numpy as np

from wmtp_jax.decode.state import DecodeState
from wmtp_jax.engine.inputs import Inputs
from wmtp_jax.engine.layout import Layout
from wmtp_jax.engine.options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Warming:
    """``constrained`` and ``rests`` say which programs there are besides those that every engine has."""

    layout: Layout
    inputs: Inputs
    options: EngineOptions
    constrained: bool
    rests: bool

    def warmed(self, state: DecodeState) -> DecodeState:
        """The state, given away and taken back, with nothing in it."""
        slots, table = self.layout.slots, np.zeros(self.layout.row_pages, np.int32)
        state = slots.remember(slots.clear(state, 0, 0), 0, [0], [])
        for chunk in slots.chunks:
            state = slots.read(state, 0, table, [0] * chunk, 0)
        state = slots.restore(state, 0, 1, slots.keep(state, 0), 0)
        for plain in (True, False):
            sampling, stops = self.inputs.for_params([], 1, plain=plain), self.inputs.stops([], 1)
            state, *_ = slots.begin(state, 0, 1, sampling, stops, None, self.inputs.first_allowed(plain=plain))
        for bucket in self._buckets():
            state = self._stepped(state, bucket, np.stack([table] * bucket))
        # The pages were written to, by nobody.
        return slots.clear(state, 0, 0)

    def _buckets(self) -> list[int]:
        buckets = [1]
        while buckets[-1] < self.options.rows:
            buckets.append(min(2 * buckets[-1], self.options.rows))
        return buckets

    def _stepped(self, state: DecodeState, bucket: int, tables: np.ndarray) -> DecodeState:
        nobody, stops = [self.options.rows] * bucket, self.inputs.stops([], bucket)
        slots, steps = self.layout.slots, self.options.steps
        for plain in (True, False):
            sampling = self.inputs.for_params([], bucket, plain=plain)
            for drafting in (True, False) if self.rests else (True,):
                state, _ = slots.run(state, nobody, tables, sampling, stops, steps, drafting=drafting)
        if self.constrained:
            sampling = self.inputs.for_params([], bucket, plain=False)
            state, drafts = slots.propose(state, nobody, tables, sampling)
            allowed = self.inputs.allowed(bucket, drafts.shape[1] + 1)
            state, _ = slots.verify(state, nobody, tables, drafts, allowed, sampling, stops)
        return state
