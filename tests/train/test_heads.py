"""Head training: labels, what is trained and what is not, resuming, and the file that comes out."""

import dataclasses
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wmtp_jax as wmtp
from tests.clp.backbones import heads_config, random_heads, with_random_heads
from tests.decode.driving import SHAPES, Batch, Request, prefilled
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.cli import main
from wmtp_jax.clp.config import fingerprint
from wmtp_jax.clp.drafter import drafted, heads_drafter
from wmtp_jax.clp.heads import Heads, features
from wmtp_jax.clp.store import HEADS_NAME, attach, draft_vocabulary, load_heads, save_heads
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError
from wmtp_jax.models.parameters import named_parameters, with_parameters
from wmtp_jax.train.distill import distilled_sequences
from wmtp_jax.train.head_data import Collected, Sequences, collect, split, text_sequences
from wmtp_jax.train.head_outputs import head_logits, judge, spans
from wmtp_jax.train.head_run import HeadRun, run_heads
from wmtp_jax.train.head_trainer import HeadTraining, initial_heads, train_heads

KINDS = ["parallel", "residual", "recurrent", "own"]
# An MTP layer cannot compete with the backbone's head: it sees that head's token.
ARRANGEMENTS = [*((kind, False) for kind in KINDS), ("parallel", True), ("residual", True)]


def sequences(model, rows: int, length: int, seed: int) -> Collected:
    """Random sequences in which every other token follows from the one before, and their states."""
    rng = np.random.default_rng(seed)
    vocab = model.config.vocab_size
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % vocab
    hidden = jax.jit(lambda m, x: m.sequence(x))(model, jnp.asarray(tokens)).astype(jnp.bfloat16)
    return Collected(Sequences(tokens, rng.random(tokens.shape) < 0.9), np.asarray(hidden).view(np.uint16))


@pytest.mark.parametrize(("kind", "competing"), ARRANGEMENTS)
@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_labels_are_those_of_going_through_the_text_token_by_token(kind, draft_vocab, competing):
    model, k = tiny_model("hybrid", 4), 3
    config = heads_config(model, kind, k, draft_vocab=draft_vocab, competing=competing)
    ids = np.arange(0, 2 * draft_vocab, 2, dtype=np.int32) if draft_vocab else None
    heads, vocabulary = random_heads(config, model, 1), draft_vocabulary(model, ids)
    collected = sequences(model, 3, 14, 0)
    hidden, tokens, counted = collected.batch(np.arange(3))
    judged = judge(model, heads, vocabulary, hidden.astype(jnp.float32), tokens, counted)
    logits = [np.asarray(vocabulary.spread(own)) for own in judged.logits]
    span, there = (np.asarray(x) for x in spans(judged))
    tokens, counted, offset = np.asarray(tokens), np.asarray(counted), config.offset
    for row in range(3):
        for t in range(14):
            last = t + offset + k - 1
            whole = last < 14 and all(counted[row, t + offset + i] for i in range(k))
            assert there[row, t] == whole
            if whole:
                right = [logits[i][row, t].argmax() == tokens[row, t + offset + i] for i in range(k)]
                assert span[row, t] == next((i for i, ok in enumerate(right) if not ok), k)


@pytest.mark.parametrize("kind", KINDS)
def test_training_changes_heads_and_nothing_else(kind, tmp_path):
    model = tiny_model("hybrid", 4)
    before = {name: np.asarray(value).copy() for name, value in named_parameters(model).items()}
    heads, rows = _trained(model, kind, tmp_path, epochs=12.0)
    for name, value in named_parameters(model).items():
        np.testing.assert_array_equal(np.asarray(value), before[name], err_msg=name)
    accuracy = [row["held_out_accuracy"] for row in rows if "held_out_accuracy" in row]
    if kind != "own":
        losses = [row["loss"][0] for row in rows if "loss" in row]
        assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.2
        assert len(accuracy[-1]) == 2
    lengths = rows[-1]["span_shares"]
    assert lengths.sum() == pytest.approx(1)
    assert rows[-1]["mean_span"] == pytest.approx(lengths @ np.arange(3))
    start = initial_heads(heads.config, model, 0)
    changed = {
        name.split(".")[0]
        for (name, one), two in zip(named_parameters(start).items(), named_parameters(heads).values(), strict=True)
        if not np.array_equal(one, two)
    }
    assert changed == {"predictor", "gate"} | (set() if kind == "own" else {"writers"})


def _trained(model, kind, folder, epochs: float, save_every: int = 10, stop: int | None = None):
    config = heads_config(model, kind, 2)
    rows: list = []

    def report(row):
        rows.append(row)
        if stop is not None and row.get("step") == stop and "held_out_accuracy" in row:
            raise KeyboardInterrupt

    training = HeadTraining(
        epochs=epochs, rows=8, learning_rate=1e-2, warmup=5, save_every=save_every, predictor_epochs=2
    )
    heads = train_heads(
        model, initial_heads(config, model, 0), draft_vocabulary(model, None),
        sequences(model, 40, 18, 1), training, folder, report,
    )  # fmt: skip
    return heads, rows


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    model = tiny_model("attention", 2)
    whole, _ = _trained(model, "residual", tmp_path / "whole", epochs=5.0, save_every=4)
    with pytest.raises(KeyboardInterrupt):
        _trained(model, "residual", tmp_path / "parts", epochs=5.0, save_every=4, stop=8)
    resumed, rows = _trained(model, "residual", tmp_path / "parts", epochs=5.0, save_every=4)
    assert rows[0]["step"] == 9
    for name, value in named_parameters(resumed).items():
        np.testing.assert_allclose(value, named_parameters(whole)[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("width", "k", "parameters"), [(1536, 2, 4611), (1536, 4, 7685), (20, 3, 84)])
def test_the_predictor_has_a_class_for_every_length_and_one_layer(width, k, parameters):
    config = dataclasses.replace(CONFIGS["attention"], hidden_size=width)
    described = heads_config(tiny_model("attention", 0), "own", k)
    heads = nnx.eval_shape(lambda: Heads(dataclasses.replace(described, hidden_size=width), config, rngs=nnx.Rngs(0)))
    named = named_parameters(heads)
    assert sum(np.prod(v.shape) for n, v in named.items() if n.startswith("predictor.")) == parameters
    assert 0.9e6 < sum(np.prod(v.shape) for n, v in named.items() if n.startswith("gate.")) < 1.2e6


@pytest.mark.parametrize(("kind", "competing"), ARRANGEMENTS)
def test_what_is_judged_in_training_is_what_is_drafted(kind, competing):
    """The logits that a label is made from are those that a draft at the same place is chosen from."""
    shape, k = replace(SHAPES[0], rows=1, window=60, sink=0), 3
    model = with_random_heads(shape.model, kind, k, 6, draft_vocab=20, competing=competing)
    batch = Batch(shape, [Request([3, 1, 4, 1, 5, 9, 2, 6], 20, -1, SamplingParams())])
    drafter = heads_drafter(model, model.heads.config.drafts, 60, 0)
    state = prefilled(model, drafter, batch)
    drafts, logits, _ = drafted(model, drafter, state, batch.sampling)
    whole = jnp.asarray([[*batch.prompts[0], int(state.pending[0]), *np.asarray(drafts[0]).tolist()]])
    vocabulary = model.draft_vocabulary
    judged = head_logits(model, model.heads, vocabulary, model.sequence(whole), whole)
    at = len(batch.prompts[0]) - 1
    for head, own in enumerate(judged[int(competing) :]):
        np.testing.assert_allclose(vocabulary.spread(own)[0, at], logits[0, head], atol=1e-4)


def test_features_are_what_their_names_say():
    logits = np.random.default_rng(0).standard_normal((3, 7)) * 2
    chance = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    ordered = np.sort(chance, axis=-1)
    expected = np.stack([ordered[:, -1], ordered[:, -1] - ordered[:, -2], -(chance * np.log(chance)).sum(-1)], -1)
    np.testing.assert_allclose(features(jnp.asarray(logits)), expected, atol=1e-5)


def test_sequences_for_heads_predictor_and_evaluation_are_apart():
    parts = split(sequences(tiny_model("attention", 0), 43, 4, 0), 7)
    assert sorted(np.concatenate(parts).tolist()) == list(range(43))
    assert [len(part) for part in parts] == [35, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_vocab", [0, 9])
def test_heads_come_back_from_the_file(kind, draft_vocab, tmp_path):
    model = tiny_model("hybrid", 4)
    heads = random_heads(heads_config(model, kind, 3, draft_vocab=draft_vocab), model, 2)
    ids = np.arange(1, 1 + draft_vocab, dtype=np.int32) if draft_vocab else None
    save_heads(heads, ids, tmp_path / HEADS_NAME, {"seed": "0"})
    read, vocabulary = load_heads(tmp_path, model)
    assert read.config == heads.config
    assert vocabulary.ids[...].tolist() == (list(range(model.config.vocab_size)) if ids is None else ids.tolist())
    for name, value in named_parameters(read).items():
        np.testing.assert_allclose(value, named_parameters(heads)[name], rtol=0.01, err_msg=name)
    attached = attach(model, read, vocabulary)
    own, backbones = (np.asarray(m.mtp.fc.kernel[...]) for m in (attached, model))
    assert np.array_equal(own, backbones) == (kind != "recurrent")
    assert model.heads is None


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "no such file; `wmtp train heads` makes one"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "not a complete file of heads"),
        (lambda path: path.write_bytes(b"garbage"), "not a complete file of heads"),
        (lambda path: path.write_bytes(b""), "not a complete file of heads"),
    ],
)
def test_a_damaged_file_of_heads_is_named(harm, message, tmp_path):
    model = tiny_model("hybrid", 4)
    save_heads(random_heads(heads_config(model, "residual", 2), model, 2), None, tmp_path / HEADS_NAME, {})
    harm(tmp_path / HEADS_NAME)
    with pytest.raises(UserError, match=message):
        load_heads(tmp_path / HEADS_NAME, model)


def test_heads_of_another_backbone_are_refused(tmp_path):
    model, other = tiny_model("hybrid", 4), tiny_model("hybrid", 5)
    assert fingerprint(model) != fingerprint(other)
    save_heads(random_heads(heads_config(model, "residual", 2), model, 2), None, tmp_path / HEADS_NAME, {})
    with pytest.raises(UserError, match="heads for another backbone of the same shape"):
        load_heads(tmp_path, other)
    with pytest.raises(UserError, match="heads for a backbone of width"):
        load_heads(tmp_path, tiny_model("attention", 4))


def test_a_backbone_has_one_fingerprint_in_every_dtype():
    model = wmtp.load()
    assert fingerprint(model.decoder) == fingerprint(wmtp.load(dtype="bfloat16").decoder)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_fingerprint_sees_every_layer(stacked):
    model = tiny_model("mamba", 4, unrolled=not stacked)
    assert fingerprint(model) == fingerprint(tiny_model("mamba", 4, unrolled=stacked))
    found = {fingerprint(model)}
    names = [name for name in named_parameters(model) if name.startswith("blocks.")]
    for name in names[:: len(names) // 7]:
        parameters = named_parameters(model)
        parameters[name] = parameters[name] + 0.5
        found.add(fingerprint(with_parameters(model, parameters)))
    assert len(found) == 1 + len(names[:: len(names) // 7])


def test_data_and_heads_of_another_run_are_not_taken_up(tmp_path):
    model, notes = wmtp.load(), []
    text = tmp_path / "text.txt"
    text.write_text("The President shall say what he shall say. " * 200)
    given = HeadRun(kind="residual", text=text, tokens=1500, length=32, training=HeadTraining(epochs=0.5, warmup=1))

    def once(options):
        notes.clear()
        run_heads(model, options, tmp_path / "out", lambda row: notes.append(row.get("note")))
        return [note for note in notes if note and note.endswith("sequences read")]

    assert once(given)
    assert not once(given)
    text.write_text(text.read_text() + "And so on. ")
    for other in (
        given,
        replace(given, tokens=1400),
        replace(given, draft_vocab=100),
        replace(given, training=replace(given.training, seed=1)),
    ):
        with pytest.raises(UserError, match=r"holds a run with other (data|heads|training); give another --out"):
            once(other)


def test_damaged_training_data_is_named(tmp_path):
    model = tiny_model("attention", 2)
    made = sequences(model, 12, 8, 0)
    collect(model, tmp_path / "data", lambda: made.sequences, 4, lambda line: None)
    again = collect(model, tmp_path / "data", lambda: pytest.fail("made again"), 4, lambda line: None)
    np.testing.assert_array_equal(again.hidden, made.hidden)
    np.testing.assert_array_equal(again.sequences.counted, made.sequences.counted)
    (tmp_path / "data" / "tokens.npy").write_bytes(b"no numbers")
    with pytest.raises(UserError, match=r"damaged training data .*; remove it, and it is made again"):
        collect(model, tmp_path / "data", lambda: made.sequences, 4, lambda line: None)


def test_an_interrupted_collection_leaves_nothing(tmp_path):
    model = tiny_model("attention", 2)

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, tmp_path / "data", lambda: sequences(model, 12, 8, 0).sequences, 4, interrupt)
    assert list(tmp_path.iterdir()) == []


PROMPTS = ["The President shall", "And it came to pass", "x " * 100, "Enter the king"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_distilled_answers_are_the_backbones_own(temperature):
    model = wmtp.load()
    made = distilled_sequences(model, PROMPTS, 48, temperature=temperature, rows=2, seed=7, note=lambda line: None)
    assert len(made) == 3
    short = [prompt for prompt in PROMPTS if len(prompt) < 100]
    for index, (prompt, tokens, counted) in enumerate(zip(short, made.tokens, made.counted, strict=True)):
        asked = model.encode(prompt)
        given = dict(gamma=0, max_new_tokens=48 - len(asked), temperature=temperature, seed=7 + index)
        answer = wmtp.generate(model, asked, **given).tokens[0]
        assert tokens[: len(asked) + len(answer)].tolist() == [*asked, *answer]
        assert counted.nonzero()[0].tolist() == list(range(len(asked), len(asked) + len(answer)))


def test_answers_of_an_interrupted_run_are_not_asked_for_again(tmp_path, monkeypatch):
    model, kept, notes = wmtp.load(), tmp_path / "data" / "answers.jsonl", []
    given = dict(temperature=0.0, rows=2, seed=0)
    whole = distilled_sequences(model, PROMPTS, 48, **given, note=notes.append)
    monkeypatch.setattr("wmtp_jax.train.distill._NOTED", 1)

    def interrupt(line):
        if line.startswith("2 of"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distilled_sequences(model, PROMPTS, 48, **given, note=interrupt, kept=kept)
    assert len(kept.read_text().splitlines()) == 2
    # The last line may have been cut short.
    kept.write_text(kept.read_text()[:-5])
    notes.clear()
    again = distilled_sequences(model, PROMPTS, 48, **given, note=notes.append, kept=kept)
    assert notes == ["1 answers were there already", "1 of 2 prompts answered", "2 of 2 prompts answered"]
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_array_equal(again.counted, whole.counted)
    notes.clear()
    distilled_sequences(model, PROMPTS, 48, **given, note=notes.append, kept=kept)
    assert notes == ["3 answers were there already"]


def test_text_is_learned_whole_and_an_end_stands_between_documents():
    model = wmtp.load()
    made = text_sequences(model, ["Enter the king", "And it came to pass"] * 40, 16, 200)
    end = model.eos_ids[0]
    ids = [*model.encode_bare("Enter the king"), end, *model.encode_bare("And it came to pass"), end]
    assert made.tokens.shape == (200 // 16, 16)
    assert made.counted.all()
    flat = made.tokens.reshape(-1).tolist()
    assert flat == (ids * 80)[: len(flat)]
    with pytest.raises(UserError, match=r"the text has only \d+ tokens, and a sequence 16: give more text"):
        text_sequences(model, ["Enter"], 16, 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "--rows 0: must be 1 or more"),
        (["--epochs", "nan"], "--epochs nan: must be a number above 0"),
        (["--learning-rate", "-1"], "--learning-rate -1.0: must be a number above 0"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--k", "9"], "k=9 must be a whole number from 1 to 8"),
        (["--length", "8"], "--length 8: must be 16 or more"),
        (["--tokens", "100"], "--tokens 100: must be 256 or more"),
        (["--draft-vocab", "1"], "draft_vocab=1 must be 0, or from 2 to"),
        (["--temperature", "0.5"], "--temperature 0.5 is of the backbone's answers: give --distill too"),
        (["--kind", "none"], "kind='none' must be one of parallel, residual, recurrent, own"),
        (["--kind", "recurrent"], "kind=recurrent: this checkpoint has an MTP head already"),
        (["--no-mtp", "--kind", "own"], "kind=own: this checkpoint has no MTP head"),
        (["--competing", "--kind", "own"], "competing heads read the hidden state alone"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file or directory"),
    ],
)
def test_bad_options_get_one_line(options, message, capsys, tmp_path):
    assert main.run(["train", "heads", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_heads_train_from_the_command_line(tmp_path, monkeypatch):
    command = ["train", "heads", "--kind", "own", "--k", "2", "--tokens", "2000", "--length", "64", "--json"]
    out: list = []
    monkeypatch.setattr("wmtp_jax.cli.train.print_json", out.append)
    assert main.run([*command, "--out", str(tmp_path)]) == 0
    result = out[0]
    assert json.loads(json.dumps(result["mean_span"])) > 0.2
    model = wmtp.load()
    heads, _ = load_heads(tmp_path / "own-2", model.decoder)
    assert heads.config.k == 2
