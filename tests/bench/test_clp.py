"""`wmtp bench clp`: every way is there, verified ways write the backbone's text, and quality is what it says."""

import json
import math

import numpy as np
import pytest

import wmtp_jax as wmtp
from wmtp_jax.bench.clp import Asked, measure
from wmtp_jax.bench.clp_quality import perplexity
from wmtp_jax.bench.clp_ways import PLAIN, PLAIN_AGAIN, ways
from wmtp_jax.bench.options import ClpOptions
from wmtp_jax.bench.timing import estimated_ratio
from wmtp_jax.cli import main
from wmtp_jax.train.head_run import HeadRun, run_heads
from wmtp_jax.train.head_trainer import HeadTraining

pytestmark = pytest.mark.slow
PROMPTS = ["The President shall", "And it came to pass", "Enter the king", "My fellow citizens"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """The demo model's own head with a length predictor, and competing heads, both trained for a moment."""
    folder = tmp_path_factory.mktemp("heads")
    training = HeadTraining(epochs=0.5, rows=4, warmup=2, predictor_epochs=2)
    for kind, competing in (("own", False), ("residual", True)):
        given = HeadRun(kind=kind, k=1 + competing, competing=competing, tokens=6000, length=64, training=training)
        run_heads(wmtp.load(), given, folder, lambda row: None)
    return [folder / "own-1", folder / "residual-2-competing"]


@pytest.fixture(scope="module")
def results(heads):
    model = wmtp.load()
    options = ClpOptions(rows=(2,), prompts=4, new_tokens=20, repeats=1)
    asked = [Asked("abba"[index], model.encode(prompt), index) for index, prompt in enumerate(PROMPTS)]
    return measure(model, heads, asked, options, lambda line: None)


def test_every_way_is_measured(results):
    rules = [f"own: {rule}, k=1" for rule in ("clp 0.3", "gate 0.3", "threshold 0.3", "all")]
    verified = [f"own: verified, {gamma}" for gamma in (1, "auto")]
    assert [result.way for result in results] == [PLAIN, PLAIN_AGAIN, *rules, *verified, "residual competing: all, k=1"]
    assert all(list(result.texts) == [0, 1, 2, 3] and result.rows == 2 for result in results)
    assert all(list(result.speedup_by_kind) == ["a", "b"] for result in results)
    assert results[0].speedup == (1, 1, 1)


def test_texts_stand_by_their_prompts(results):
    model = wmtp.load()
    alone = [wmtp.generate(model, prompt, gamma=0, max_new_tokens=20).text[0] for prompt in PROMPTS]
    assert list(results[0].texts.values()) == alone


def test_verified_ways_write_the_backbones_text_and_say_so(results):
    plain = next(result for result in results if result.way == PLAIN)
    for result in results:
        if result.verified:
            assert result.texts == plain.texts
            assert result.quality.same == 1
            assert result.quality.agreed == 20
            assert result.quality.perplexity == pytest.approx(plain.quality.perplexity)
        assert (result.accuracy is None) == (result.way not in ("own: verified, 1", PLAIN, PLAIN_AGAIN))


def test_perplexity_is_that_of_one_token_after_the_other(results):
    model = wmtp.load()
    prompt, text = model.encode("The President shall"), model.encode(" say so again")
    nats = 0.0
    for index, token in enumerate(text):
        logits = np.asarray(wmtp.logits(model, [*prompt, *text[:index]])[0, -1], np.float64)
        nats += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token]
    assert perplexity(model.decoder, [prompt], [text]) == pytest.approx(math.exp(nats / len(text)), rel=1e-4)


def test_two_files_of_one_kind_are_refused(heads):
    with pytest.raises(wmtp.UserError, match=r"two files of heads give 'own: clp 0\.3, k=1'"):
        ways(wmtp.load(), [heads[0], heads[0]], ClpOptions(prompts=1))


def test_only_some_ways_are_run_where_some_are_named(heads):
    options = ClpOptions(taus=(0.2, 0.9), only=("clp", "auto"))
    names = [way.name for way in ways(wmtp.load(), heads[:1], options)]
    assert names == [PLAIN, PLAIN_AGAIN, "own: clp 0.2, k=1", "own: clp 0.9, k=1", "own: verified, auto"]
    with pytest.raises(wmtp.UserError, match="--only: no way has 'none' in its name; the ways are own: clp"):
        ways(wmtp.load(), heads[:1], ClpOptions(only=("clp", "none")))


def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says():
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        below = rng.lognormal(0, 0.5, 60)
        found = estimated_ratio(below * 1.5 * rng.lognormal(-0.02, 0.2, 60), below, draws=400)
        assert found.low < found.value < found.high
        held += found.low < 1.5 < found.high
    assert 176 <= held <= 198


def test_the_command_prints_a_table_and_keeps_the_texts(heads, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    texts, plot = tmp_path / "texts.jsonl", tmp_path / "clp.png"
    command = ["bench", "clp", "--model", "demo", "--heads", str(heads[1]), "--prompts-file", str(prompts)]
    limits = ["--prompts", "2", "--new-tokens", "12", "--repeats", "1"]
    assert main.run([*command, *limits, "--texts", str(texts), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "residual competing: all, k=1" in printed
    assert "verified ways write the backbone's text; all others change it" in printed
    assert len(texts.read_text().splitlines()) == 6
    assert plot.stat().st_size > 1000
    assert main.run([*command, "--prompts", "9"]) == 2
    assert "--prompts 9: the file has 4" in capsys.readouterr().err
    assert main.run([*command, "--prompts", "3", "--rows", "2"]) == 2
    assert "--rows 2: must divide the 3 prompts" in capsys.readouterr().err
