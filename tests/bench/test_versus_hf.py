"""`wmtp bench versus-hf`: the contenders make the same text of the same folder, and a difference is weighed."""

from pathlib import Path

import numpy as np
import pytest

from tests.bench.folders import write_text
from wmtp_jax.bench import versus_hf
from wmtp_jax.bench.options import VersusOptions
from wmtp_jax.bench.tables import race_table
from wmtp_jax.bench.timing import Spread, Timing
from wmtp_jax.errors import UserError
from wmtp_jax.model import load

torch = pytest.importorskip("torch", reason="the other contender is Hugging Face transformers on torch")
pytest.importorskip("transformers", reason="the other contender")

PROMPT = [3, 17, 40, 8, 25, 11, 0, 30, 29]
OPTIONS = VersusOptions(new_tokens=18, gamma=3, window=5, sink=2, repeats=2, threads=1)


def race_lines(folder: Path) -> tuple[versus_hf.Race, list[str]]:
    lines: list[str] = []
    return versus_hf.versus_hf(folder, load(folder, dtype="float32"), PROMPT, OPTIONS, lines.append), lines


def test_transformers_and_both_of_our_loops_give_one_text(folder: Path) -> None:
    race, lines = race_lines(folder)
    assert list(race.timings) == ["transformers, 1 thread", "wmtp gamma 0", "wmtp gamma 3"]
    reference = race.timings["transformers, 1 thread"].tokens
    assert len(reference) == 18
    assert len(set(reference)) > 3
    assert all(timing.tokens == reference for timing in race.timings.values())
    assert race.divergences == dict.fromkeys(race.timings)
    assert race.ratios["transformers, 1 thread"] == 1.0
    assert all(len(timing.seconds) == 2 for timing in race.timings.values())
    assert lines[-2:] == ["round 1 of 2", "round 2 of 2"]
    assert list(race_table(race).columns[-1].cells) == ["yes"] * 3


def test_the_faster_transformers_is_the_yardstick() -> None:
    def timing(*seconds: float) -> Timing:
        return Timing(tokens=[1] * 11, first_seconds=Spread([1.0] * len(seconds)), seconds=Spread(seconds))

    names = versus_hf.yardstick_threads(2)
    assert names == {"transformers, 2 threads": 2, "transformers, 1 thread": 1}
    race = versus_hf.Race(
        prompt_tokens=9,
        new_tokens=11,
        threads=2,
        timings=dict(zip([*names, "ours"], (timing(6.0, 6.0, 2.0), timing(3.0, 3.0, 3.0), timing(2.0)), strict=True)),
        yardsticks=tuple(names),
        divergences={},
    )
    assert race.ratios == {"transformers, 2 threads": 0.4, "transformers, 1 thread": 1.0, "ours": 2.0}


def test_a_divergence_is_told_with_the_lead_of_the_best_logit_there(folder: Path) -> None:
    model = versus_hf.load_hugging_face(folder)
    reference = versus_hf.hugging_face_greedy(model, PROMPT, 6, 1)
    assert versus_hf.divergence(model, PROMPT, reference, list(reference)) is None
    other = [*reference[:4], (reference[4] + 1) % 43, reference[5]]
    found = versus_hf.divergence(model, PROMPT, reference, other)
    with torch.no_grad():
        logits = np.sort(model(torch.tensor([PROMPT + reference])).logits[0, len(PROMPT) + 3].numpy())
    assert found is not None
    assert found.token == 4
    assert found.logit_lead == pytest.approx(logits[-1] - logits[-2], abs=1e-5)


def test_a_folder_that_transformers_cannot_load_is_a_users_error(tmp_path: Path) -> None:
    write_text(tmp_path / "config.json", 9)
    with pytest.raises(UserError, match="transformers cannot load it"):
        versus_hf.load_hugging_face(tmp_path)
