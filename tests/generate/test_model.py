"""A model folder becomes a model with its tokenizer, its end-of-text ids and its chat template."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import wmtp_jax as wmtp
from checkpoints_convert.convert import convert
from tests.generate.tiny import EOS, TURN_END, VOCAB
from wmtp_jax.text.chat import ChatTemplate, load_chat_template

TURN = [{"role": "user", "content": "a fox"}]


def test_a_converted_folder_loads_as_the_folder_it_came_from(folder: Path, model: wmtp.Model, tmp_path: Path) -> None:
    convert(str(folder), str(tmp_path / "out"), dtype="float32")
    converted = wmtp.load(tmp_path / "out")
    assert converted.eos_ids == model.eos_ids == (EOS, TURN_END)
    assert converted.encode_chat(TURN) == model.encode_chat(TURN)
    ids = [[5, 9, 200, 11], [4, 4, 6, 300]]
    np.testing.assert_array_equal(wmtp.logits(converted, ids), wmtp.logits(model, ids))


def test_a_converted_folder_loads_without_its_draft_head(folder: Path, model: wmtp.Model, tmp_path: Path) -> None:
    convert(str(folder), str(tmp_path / "out"), dtype="float32")
    headless = wmtp.load(tmp_path / "out", no_mtp=True)
    assert model.config.has_mtp
    assert not headless.config.has_mtp
    assert headless.decoder.mtp is None
    ids = [5, 9, 200, 11]
    np.testing.assert_array_equal(wmtp.logits(headless, ids), wmtp.logits(model, ids))
    with pytest.raises(wmtp.UserError, match="no MTP head to draft with; use gamma=0"):
        wmtp.generate(headless, "a fox", gamma=2)


def test_logits_of_one_row_are_a_batch_of_one(model: wmtp.Model) -> None:
    out = wmtp.logits(model, [5, 9, 200, 11])
    assert out.shape == (1, 4, VOCAB)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0], wmtp.logits(model, [[5, 9, 200, 11], [4, 4, 6, 300]])[0], atol=1e-4)


@pytest.mark.parametrize("ids", [[[1, 2], [3]], [1.0, 2.0], [], [[[1]]], "text", [VOCAB], [-1]])
def test_logits_refuse_what_is_no_rectangle_of_token_ids(model: wmtp.Model, ids: Any) -> None:
    with pytest.raises(wmtp.UserError, match="token ids"):
        wmtp.logits(model, ids)


def test_a_dtype_that_is_not_supported_is_named(folder: Path) -> None:
    assert wmtp.load(folder, dtype="bfloat16").decoder.embedding.dtype == jnp.bfloat16
    for dtype in ("float16", "nonsense", "int8"):
        with pytest.raises(wmtp.UserError, match=f"dtype={dtype}: must be one of float32, bfloat16"):
            wmtp.load(folder, dtype=dtype)


def test_a_missing_folder_and_a_damaged_tokenizer_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(wmtp.UserError, match="no such folder"):
        wmtp.load(tmp_path / "nothing")
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    with pytest.raises(wmtp.UserError, match=r"damaged/tokenizer.json: not a tokenizer"):
        wmtp.load(tmp_path / "damaged")


def test_the_chat_template_writes_turns_and_its_own_special_tokens(model: wmtp.Model) -> None:
    ids = model.encode_chat(TURN)
    assert model.tokenizer is not None
    text = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\na fox<|im_end|>\n<|im_start|>assistant\n"
    assert (ids.count(1), ids.count(TURN_END)) == (2, 1)


def test_a_template_file_wins_and_lists_give_their_default(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    stored = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ bos_token }}listed"}]
    settings = {"chat_template": stored, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(TURN) == "<s>listed"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}from the file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(TURN) == "</s>from the file"


def test_templates_have_what_published_ones_use() -> None:
    source = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.content | tojson }}{% endfor %}{{ strftime_now('%Y')[:2] }}{{ add_generation_prompt }}"
    )
    messages = [{"role": "user", "content": "<é & 'b'>"}, {"role": "user", "content": "second"}]
    assert ChatTemplate(source=source).render(messages) == "\"<é & 'b'>\"20True"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{% if %}", "chat template fails"),
        ("{{ messages[7].content }}", "chat template fails"),
        ("{{ messages.append(1) }}", "chat template fails: .*unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails: .*unsafe"),
        ("{{ 1 + 'a' }}", "chat template fails"),
        ("{{ 1 / 0 }}", "chat template fails"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_line(source: str, message: str) -> None:
    with pytest.raises(wmtp.UserError, match=message):
        ChatTemplate(source=source).render(TURN)


def test_a_chat_without_a_template_is_refused(model: wmtp.Model) -> None:
    with pytest.raises(wmtp.UserError, match="no chat template"):
        dataclasses.replace(model, chat_template=None).encode_chat(TURN)
