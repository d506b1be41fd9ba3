"""`wmtp bench engine`: figures for every number of clients, and of a short request beside a long one."""

import json

import pytest

from wmtp_jax.cli import main

pytestmark = pytest.mark.slow
SIZES = ["--clients", "1,3", "--requests", "4", "--prompt", "20", "--new-tokens", "6", "--repeats", "1"]


def test_it_measures_clients_and_the_first_token(capsys):
    assert main.run(["bench", "engine", *SIZES, "--long", "6K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["clients"] for result in found["throughput"]] == [1, 3]
    for result in found["throughput"]:
        assert result["tokens_per_second"][0] > 0
        assert result["first_token_ms"][0] > 0
        assert 1 <= result["acceptance_length"] <= 4
    assert found["first_token"]["beside_ms"][0] > found["first_token"]["idle_ms"][0] > 0


def test_it_prints_tables(capsys):
    assert main.run(["bench", "engine", *SIZES, "--long", "0"]) == 0
    printed = capsys.readouterr().out
    assert "4 requests a round, prompts of 20 tokens, 6 new ones" in printed
    assert "first token alone" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clients", "0"], "--clients 0: must be 1 or more"),
        (["--clients", "9", "--requests", "4"], "--requests 4: must be 9 or more"),
        (["--long", "much"], "much"),
        (["--long", "32K"], "--long 32768: this model takes prompts of up to 32701 tokens here"),
    ],
)
def test_bad_options_get_one_line(options, message, capsys):
    assert main.run(["bench", "engine", *options]) == 2
    assert message in capsys.readouterr().err
