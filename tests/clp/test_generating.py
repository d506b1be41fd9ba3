"""Heads and adaptive drafts through the public face: loading, options, figures, errors."""

import pytest

import wmtp_jax as wmtp
from wmtp_jax.cli import main
from wmtp_jax.train.head_run import HeadRun, run_heads
from wmtp_jax.train.head_trainer import HeadTraining

pytestmark = pytest.mark.slow
PROMPT = "The President shall"


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory):
    """Length predictors for the demo model's own head, and residual heads beside it, both trained for a moment."""
    folder = tmp_path_factory.mktemp("heads")
    for kind in ("own", "residual"):
        training = HeadTraining(epochs=0.5, rows=4, warmup=2, predictor_epochs=3)
        options = HeadRun(kind=kind, k=2, tokens=6000, length=64, training=training)
        run_heads(wmtp.load(), options, folder, lambda row: None)
    return folder


@pytest.fixture(scope="module")
def plain():
    return wmtp.generate(wmtp.load(), PROMPT, max_new_tokens=40, gamma=0)


@pytest.mark.parametrize("kind", [None, "own", "residual"])
def test_the_number_of_drafts_is_chosen_and_the_text_is_the_same(kind, heads_folder, plain):
    model = wmtp.load(heads=None if kind is None else heads_folder / f"{kind}-2")
    out = wmtp.generate(model, PROMPT, max_new_tokens=40, gamma="auto", window=32, sink=4)
    assert out.tokens == plain.tokens
    assert out.text == plain.text
    assert len(out.stats.step_costs) == (5 if kind is None else 3)
    assert all(cost > 0 for cost in out.stats.step_costs)
    again = wmtp.generate(model, PROMPT, max_new_tokens=40, gamma="auto", step_costs=out.stats.step_costs)
    assert again.tokens == plain.tokens
    assert again.stats.step_costs is None


@pytest.mark.parametrize("accept", ["clp", "gate", "threshold", "all"])
@pytest.mark.parametrize("kind", ["own", "residual"])
def test_trusted_heads_write_the_asked_number_of_tokens(accept, kind, heads_folder, plain):
    model = wmtp.load(heads=heads_folder / f"{kind}-2")
    out = wmtp.generate(model, [PROMPT, "And it came to pass"], max_new_tokens=40, gamma=2, accept=accept, tau=0.4)
    assert [len(tokens) for tokens in out.tokens] == [40, 40]
    # The first token is the prompt's and the second the backbone's: no head has had a say yet.
    assert out.tokens[0][:2] == plain.tokens[0][:2]
    if accept == "all":
        assert out.stats.acceptance_length > 2.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", "many"], "gamma=many: must be a whole number, or auto"),
        (["--gamma", "9"], "gamma=9: must be a whole number, from 0 to 8"),
        (["--accept", "maybe"], "accept=maybe: must be one of verify, clp, gate, threshold, all"),
        (["--accept", "clp"], "accept=clp needs trained heads: `wmtp train heads` makes them, --heads takes them"),
        (["--accept", "all", "--gamma", "0"], "accept=all: gamma=0 leaves no head to trust"),
        (["--accept", "clp", "--gamma", "auto"], "accept=clp takes what its rule says of a fixed number of heads"),
        (["--tau", "2"], "tau=2.0: must be a number from 0 to 1"),
        (["--heads", "nowhere"], "nowhere: no such file; `wmtp train heads` makes one"),
        (["--accept", "all", "--compare"], "a comparison is of texts that are the same"),
    ],
)
def test_bad_options_get_one_line(options, message, capsys):
    assert main.run(["generate", PROMPT, *options]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("wmtp: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_more_heads_than_there_are_get_one_line(heads_folder, capsys):
    assert main.run(["generate", PROMPT, "--heads", str(heads_folder / "residual-2"), "--gamma", "3"]) == 2
    assert "gamma=3: these heads write 2 tokens after the backbone's; give fewer" in capsys.readouterr().err


def test_the_command_says_that_unverified_text_is_another(heads_folder, capsys):
    options = ["--heads", str(heads_folder / "own-2"), "--gamma", "2", "--accept", "clp", "--max-new-tokens", "8"]
    assert main.run(["generate", PROMPT, *options]) == 0
    assert "tokens are not verified, so this is not the text that the model would write" in capsys.readouterr().err
