"""How contenders are timed: in turn, warm, and without their prompts. No figure of a clock is tested."""

import math

import pytest

from wmtp_jax.bench.timing import Spread, Timing, decode_rate, limited_to, race, usable_cpus
from wmtp_jax.errors import UserError


def test_decoding_is_what_a_run_takes_longer_than_its_first_token() -> None:
    assert decode_rate(257, 9.0, 1.0) == 32.0
    assert math.isnan(decode_rate(257, 1.0, 1.0))
    timing = Timing(tokens=[5] * 11, first_seconds=Spread([1.0, 2.0, 3.0]), seconds=Spread([2.0, 7.0, 3.0]))
    rates = timing.tokens_per_second
    assert rates[:2] == [10.0, 2.0]
    assert math.isnan(rates[2])
    assert (rates.median, rates.low, rates.high) == (6.0, 2.0, 10.0)
    assert math.isnan(Spread([math.nan]).median)


def test_contenders_take_turns_after_a_warm_up_that_is_not_measured() -> None:
    calls: list[tuple[str, int]] = []

    def contender(name: str):
        def run(new_tokens: int) -> list[int]:
            calls.append((name, new_tokens))
            return list(range(new_tokens))

        return run

    timings = race({"a": contender("a"), "b": contender("b")}, 7, 3, lambda line: None)
    a, b = [("a", 1), ("a", 7)], [("b", 1), ("b", 7)]
    assert calls == [*a, *b] * 4
    assert list(timings) == ["a", "b"]
    for timing in timings.values():
        assert timing.tokens == list(range(7))
        assert len(timing.seconds) == len(timing.first_seconds) == 3


def test_processors_are_given_back() -> None:
    before = usable_cpus()
    with limited_to(1):
        assert len(usable_cpus()) == 1
    assert usable_cpus() == before
    with pytest.raises(UserError, match="may use only"), limited_to(len(before) + 1):
        pass
