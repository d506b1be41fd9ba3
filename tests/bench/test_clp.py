"""`wmtp bench clp`: every way is there, verified ways write the backbone's text, and quality is what it says."""

import json
import math

import numpy as np
import pytest

import wmtp_jax as wmtp
from wmtp_jax.bench.clp import PLAIN, ClpOptions, measure, perplexity, ways
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
    return measure(model, heads, [model.encode(prompt) for prompt in PROMPTS], options, lambda line: None)


def test_every_way_is_measured(results):
    rules = [f"own: {rule}, k=1" for rule in ("clp", "gate", "threshold", "all")]
    verified = [f"own: verified, {gamma}" for gamma in (1, "auto")]
    assert [result.way for result in results] == [PLAIN, *rules, *verified, "residual competing: all, k=1"]
    assert all(len(result.texts) == 4 and result.rows == 2 for result in results)


def test_verified_ways_write_the_backbones_text_and_say_so(results):
    plain = next(result for result in results if result.way == PLAIN)
    for result in results:
        if result.verified:
            assert result.texts == plain.texts
            assert result.quality.same == 1
            assert result.quality.agreed == 20
            assert result.quality.perplexity == pytest.approx(plain.quality.perplexity)
        assert (result.accuracy is None) == (result.way != "own: verified, 1" and result.way != PLAIN)


def test_perplexity_is_that_of_one_token_after_the_other(results):
    model = wmtp.load()
    prompt, text = model.encode("The President shall"), model.encode(" say so again")
    nats = 0.0
    for index, token in enumerate(text):
        logits = np.asarray(wmtp.logits(model, [*prompt, *text[:index]])[0, -1], np.float64)
        nats += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token]
    assert perplexity(model.decoder, [prompt], [text]) == pytest.approx(math.exp(nats / len(text)), rel=1e-4)


def test_two_files_of_one_kind_are_refused(heads):
    with pytest.raises(wmtp.UserError, match="two files of heads give 'own: clp, k=1'"):
        ways(wmtp.load(), [heads[0], heads[0]], ClpOptions(prompts=1))


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
    assert len(texts.read_text().splitlines()) == 4
    assert plot.stat().st_size > 1000
    assert main.run([*command, "--prompts", "9"]) == 2
    assert "--prompts 9: the file has 4" in capsys.readouterr().err
    assert main.run([*command, "--prompts", "3", "--rows", "2"]) == 2
    assert "--rows 2: must divide the 3 prompts" in capsys.readouterr().err
