"""Text bound to a grammar, and log-probabilities: the same whatever is drafted, and as the model has them."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import wmtp_jax as wmtp
from tests.engine.requests import CONSTRAINTS, CONTEXT, Asked, Heard, alone, assert_nothing_is_held, drive, make_core
from wmtp_jax.text.constraints import Constraint, GrammarFailed, Matcher


@pytest.mark.slow
def test_bound_texts_fit_and_do_not_depend_on_drafts():
    rng = np.random.default_rng(4)
    work = [
        Asked(
            rng.integers(0, 29, 5 + index).tolist(),
            dict(max_new_tokens=20, temperature=index % 3 / 2, seed=index, constraint=CONSTRAINTS[index % 4]),
            turn=index,
        )
        for index in range(12)
    ]
    core, plain = make_core("bound"), make_core("bound", gamma=0, rows=1, window=0, sink=0)
    heard, undrafted = drive(core, work), drive(plain, work)
    assert [got.tokens for got in heard] == [got.tokens for got in undrafted] == [alone(core, a)[0] for a in work]
    ended = 0
    for asked, got in zip(work, heard, strict=True):
        text, constraint = "".join(event.text for event in got.events), asked.options["constraint"]
        if got.finished == "length":
            continue
        ended += 1
        if constraint.regex is not None:
            assert re.fullmatch(constraint.regex, text)
        else:
            value = json.loads(text)
            assert all(type(item) is int for item in value) if isinstance(value, list) else value["a"] in (1, 22)
    assert ended >= 6
    # Drafts are of use within a constraint too.
    assert core.meter.acceptance_length > 1
    assert_nothing_is_held(core)


@pytest.mark.parametrize("kind", ["roomy", "bound"])
def test_log_probabilities_are_the_models_own(kind):
    """Whatever the sampling, the drafts and the neighbours."""
    core = make_core(kind)
    sampled = dict(temperature=0.8, top_k=5, frequency_penalty=0.3, seed=3)
    bound = dict(constraint=CONSTRAINTS[0]) if kind == "bound" else {}
    work = [
        Asked([1, 5, 9, 2], dict(max_new_tokens=18, logprobs=3)),
        Asked([7, 7, 1], dict(max_new_tokens=15, logprobs=0, **sampled)),
        Asked([4, 0, 8], dict(max_new_tokens=12, **sampled)),
        Asked([2, 4], dict(max_new_tokens=16, logprobs=20, **bound)),
    ]
    for asked, got in zip(work, drive(core, work), strict=True):
        wanted = asked.options.get("logprobs")
        if wanted is None:
            assert all(event.logprobs is None for event in got.events)
            continue
        told = [one for event in got.events for one in event.logprobs or []]
        assert len(told) == len(got.tokens)
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(asked.prompt) + len(got.tokens)] = [*asked.prompt, *got.tokens]
        true = np.asarray(jax.nn.log_softmax(wmtp.logits(core.model, padded)[0], axis=-1))
        for place, (token, one) in enumerate(zip(got.tokens, told, strict=True), len(asked.prompt) - 1):
            assert one.logprob == pytest.approx(true[place, token], abs=2e-4)
            best = np.argsort(-true[place])[:wanted]
            np.testing.assert_allclose([value for _, value in one.top], true[place, best], atol=2e-4)
            np.testing.assert_allclose([true[place, token] for token, _ in one.top], true[place, best], atol=2e-4)


def test_events_say_which_tokens_were_drafted():
    core = make_core("roomy")
    (got,) = drive(core, [Asked([1, 5, 9, 2], dict(max_new_tokens=40, ignore_eos=True))])
    drafted = [flag for event in got.events for flag in event.drafted]
    assert len(drafted) == len(got.tokens)
    # The first token comes from the prompt; each step after it has one token that is the target's own.
    assert drafted.count(False) == 1 + core.meter.steps
    assert any(drafted)


@pytest.mark.parametrize(("place", "call"), [("allowed", 1), ("allowed", 3), ("advance", 1), ("advance", 3)])
def test_a_grammar_that_fails_ends_its_own_request_alone(place, call, monkeypatch):
    calls, real = [], getattr(Matcher, place)

    def failing(matcher, *arguments):
        calls.append(1)
        if len(calls) == call:
            raise GrammarFailed("the constraint cannot be followed: too complex")
        return real(matcher, *arguments)

    monkeypatch.setattr(Matcher, place, failing)
    core = make_core("bound")
    work = [
        Asked([1, 2, 3], dict(max_new_tokens=20, constraint=Constraint(regex="[a-z]{30}"))),
        Asked([4, 5], dict(max_new_tokens=12, ignore_eos=True)),
    ]
    heard = drive(core, work)
    (error,) = heard[0].errors
    assert "too complex" in str(error)
    assert heard[1].tokens == alone(core, work[1])[0]
    assert_nothing_is_held(core)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (dict(regex="("), "regex: unclosed group"),
        (dict(regex="(?=x)a"), "regex: look-around"),
        (dict(regex=3), "regex: must be text, not int"),
        (dict(json_schema={"type": "objec"}), "json_schema: Invalid type: objec"),
        (dict(json_schema={"not": {}}), "json_schema: Unimplemented keys"),
        (dict(json_schema={"$ref": "#/x"}), "json_schema: Pointer '/x' does not exist"),
        (dict(json_schema={"enum": [{1, 2}]}), "json_schema: Object of type set"),
        (dict(json_schema={"enum": ["a" * 2**18]}), "json_schema: is larger than 262144 bytes"),
        (dict(json_schema=[1]), "json_schema: must be an object, not list"),
        (dict(json_schema={"x-guidance": {"lenient": True}}), "json_schema: x-guidance: a schema cannot set"),
        (dict(), "a constraint is either"),
        (dict(regex="a", json_schema={}), "a constraint is either"),
    ],
)  # fmt: skip
def test_bad_constraints_get_one_line(constraint, message):
    core = make_core("bound")
    with pytest.raises(wmtp.UserError, match=re.escape(message)) as caught:
        core.make_task([1], Heard(), max_new_tokens=9, constraint=Constraint(**constraint))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [
        '{"type": "array", "items": {"$ref": NEXT}}',
        '{"type": "object", "properties": {"a": {"$ref": NEXT}}}',
        '{"allOf": [{"$ref": NEXT}]}',
        '{"anyOf": [{"$ref": NEXT}, {"type": "integer"}]}',
        '{"$ref": NEXT}',
    ],
)
def test_the_longest_chain_of_references_ends_no_process(link):
    """In a process of its own: what it is about would end this one."""
    script = f"""
from tests.engine.requests import small_model
from wmtp_jax.errors import UserError
from wmtp_jax.text.constraints import _SCHEMA_BYTES, Constraint, Grammars
model = small_model("hybrid")
grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
import json
one = json.loads('{link}'.replace("NEXT", '"#/$defs/00000"'))
count = (_SCHEMA_BYTES - 200) // (len(json.dumps(one)) + 11)
links = {{f"{{i:05}}": json.loads('{link}'.replace("NEXT", f'"#/$defs/{{i + 1:05}}"')) for i in range(count)}}
schema = {{"$defs": {{**links, f"{{count:05}}": {{"type": "null"}}}}, "$ref": "#/$defs/00000"}}
assert 0.98 * _SCHEMA_BYTES < len(json.dumps(schema)) <= _SCHEMA_BYTES
try:
    matcher = grammars.matcher(Constraint(json_schema=schema))
    print("made", matcher.allowed().any())
except UserError as error:
    print("refused", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(("made True", "refused"))


def test_a_constraint_does_not_go_with_texts_that_have_no_end():
    with pytest.raises(wmtp.UserError, match="ignore_eos: a constrained text ends where its constraint does"):
        make_core("bound").make_task([1], Heard(), max_new_tokens=9, constraint=CONSTRAINTS[0], ignore_eos=True)
