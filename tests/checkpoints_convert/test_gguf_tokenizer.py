"""The tokenizer of a GGUF file splits text as the one that it was made from."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from checkpoints_convert.convert import convert
from checkpoints_convert.gguf_config import Metadata
from checkpoints_convert.gguf_tokenizer import write_tokenizer
from tests.checkpoints_convert.gguf_files import write_small
from wmtp_jax.text.chat import load_chat_template
from wmtp_jax.text.tokenizer import decode, encode, load_tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = ["<think>", "</think>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it doesn't stop, they'll say, and we've seen 123 4567 89.",
    "    def sort(items):\n        return sorted(items, key=lambda x: x[1])\n\n\n\t# 3.14159  tabs\tand  spaces\r\n",
    "Ärger über Öl, façade, naïve; 日本語のテキストと漢字、한국어 텍스트. Привет, мир! 🎉🚀 ½ ² Ⅷ ٣٤ e\u0301",
]
TEXTS = [
    "", " ", "   ", "a", " a", "a ", "\n", "\r\n\r\n", "\t\t x", "Hello, world!", "don't I'LL we've 'S 's",
    "12", " 1234567", "a1b22c333", "x  345 ", "3.14e-10", "½²Ⅷ٣٤", "日本語 한국어", "e\u0301 \u212b ﬁ",
    "🎉🚀👩‍👩‍👧", "\u00a0\u2003x", "\x00\x7f", "<|im_start|>user\nhi<|im_end|>\n", "<|im_end|><|im_end|> a",
    "x<think>\n\ny</think> z", "<|im_start", *CORPUS,
]  # fmt: skip


@functools.cache
def byte_level_vocabulary():
    """Tokens, kinds and merges of a small tokenizer, trained on ``CORPUS``."""
    trained = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    trained.train_from_iterator(CORPUS * 4, trainer)
    model = json.loads(trained.to_str())["model"]
    plain = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*CONTROL, *plain, *USER]
    kinds = [3] * len(CONTROL) + [1] * len(plain) + [4] * len(USER)
    return tokens, kinds, [" ".join(merge) for merge in model["merges"]]


def byte_level(pre, **changes):
    tokens, kinds, merges = byte_level_vocabulary()
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


@functools.cache
def sentencepiece_vocabulary():
    letters = sorted(set("".join(CORPUS).replace(" ", "▁")) - set("日ü"))
    words = [
        "▁the",
        "▁t",
        "he",
        "▁qu",
        "ick",
        "ic",
        "ck",
        "▁quick",
        "er",
        "▁over",
        "▁o",
        "ver",
        "ve",
        "▁▁",
        "▁▁▁▁",
        "in",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "<pad>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters)), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))] + [0.0]
    return tokens, kinds, scores


def sentencepiece(**changes):
    tokens, kinds, scores = sentencepiece_vocabulary()
    values = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def written(folder, metadata):
    """The tokenizer that is written for this metadata, and the warnings."""
    folder.mkdir(exist_ok=True)
    warnings = write_tokenizer(Metadata(folder / "x.gguf", {"general.architecture": "llama", **metadata}), folder)
    return load_tokenizer(folder), warnings


def ids_of(tokenizer, text, special=True):
    return encode(tokenizer, text, add_special_tokens=special)


def oracle_of(tmp_path, metadata, architecture):
    """What transformers makes of the same file."""
    transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face transformers")
    pytest.importorskip("torch", reason="transformers reads GGUF files with torch")
    write_small(tmp_path / "x.gguf", architecture, metadata=metadata)
    return transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")


def assert_same_tokens(oracle, ours, texts):
    for text in texts:
        expected = oracle(text, add_special_tokens=True)["input_ids"]
        assert ids_of(ours, text) == expected, text
        assert decode(ours, expected) == oracle.decode(expected, skip_special_tokens=True), text


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [("llama", "gpt-2"), ("llama", "llama-bpe"), ("qwen2", "qwen2")],
)
def test_byte_level_text_splits_as_in_transformers(tmp_path, architecture, pre):
    metadata = byte_level(pre, add_bos_token=pre == "llama-bpe")
    ours, warnings = written(tmp_path / "out", metadata)
    assert warnings == []
    # Of a file, transformers forgets that Qwen2 composes characters; its own class, below, does not.
    texts = [text for text in TEXTS if pre != "qwen2" or "\u0301" not in text]
    assert_same_tokens(oracle_of(tmp_path, metadata, architecture), ours, texts)


def test_qwen2_text_splits_as_in_the_class_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face transformers")
    tokens, _, merges = byte_level_vocabulary()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    oracle = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    oracle.add_special_tokens({"additional_special_tokens": CONTROL})
    oracle.add_tokens(USER)
    ours, _ = written(tmp_path / "out", byte_level("qwen2"))
    assert_same_tokens(oracle, ours, TEXTS)


def test_smollm_text_splits_as_in_transformers_but_every_digit_alone(tmp_path):
    """transformers takes a smollm file for one of GPT-2, whose words hold digits and the space before them."""
    ours, _ = written(tmp_path / "out", byte_level("smollm"))
    oracle = oracle_of(tmp_path, byte_level("smollm"), "llama")
    assert_same_tokens(oracle, ours, [text for text in TEXTS if not any(letter.isnumeric() for letter in text)])
    for text in TEXTS:
        cut = "".join(f"\0{letter}\0" if letter.isnumeric() else letter for letter in text).split("\0")
        pieces = [piece for piece in cut if piece]
        expected = [token for piece in pieces for token in oracle(piece, add_special_tokens=False)["input_ids"]]
        if "<" not in text and "\0" not in text:
            assert ids_of(ours, text) == expected, text


@pytest.mark.parametrize("bos", [None, True, False])
def test_sentencepiece_text_splits_as_in_transformers(tmp_path, bos):
    metadata = sentencepiece(add_bos_token=bos)
    ours, warnings = written(tmp_path / "out", metadata)
    assert warnings == []
    texts = [*TEXTS, "<s> a</s>b", "  the quick", "▁▁ the"]
    assert_same_tokens(oracle_of(tmp_path, metadata, "llama"), ours, texts)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_its_tokens(tmp_path_factory, text):
    pieces = (sentencepiece(), sentencepiece(add_space_prefix=False))
    for metadata in (byte_level("smollm"), byte_level("llama-bpe", add_bos_token=False), *pieces):
        ours, _ = written(tmp_path_factory.mktemp("out"), metadata)
        ids = ids_of(ours, text)
        assert ours.decode(ids, skip_special_tokens=False).removeprefix("<s>").lstrip(" ") in (text.lstrip(" "), text)


@pytest.mark.parametrize(
    ("metadata", "around"),
    [
        (byte_level("gpt-2"), ([], [])),
        (byte_level("llama-bpe"), ([1], [])),
        (byte_level("llama-bpe", add_bos_token=False), ([], [])),
        (byte_level("gpt-2", add_bos_token=True), ([1], [])),
        (byte_level("gpt-2", add_bos_token=True, add_eos_token=True), ([1], [2])),
        (byte_level("gpt-2", add_bos_token=True, bos_token_id=None), ([], [])),
        (sentencepiece(), ([1], [])),
        (sentencepiece(add_bos_token=False), ([], [])),
    ],
)
def test_the_tokens_around_a_text_are_those_that_the_file_asks_for(tmp_path, metadata, around):
    ours, _ = written(tmp_path, metadata)
    bare = ids_of(ours, "a fox", special=False)
    assert ids_of(ours, "a fox") == [*around[0], *bare, *around[1]]


def test_tokens_of_llama_3_need_no_merges(tmp_path):
    tokens, kinds, merges = byte_level_vocabulary()
    whole = {"tokens": [*tokens, "Ġzyxw"], "token_type": [*kinds, 1], "merges": merges}
    ours, _ = written(tmp_path / "llama", byte_level("llama-bpe", add_bos_token=False, **whole))
    assert ids_of(ours, " zyxw") == [len(tokens)]
    other, _ = written(tmp_path / "gpt", byte_level("gpt-2", **whole))
    assert len(ids_of(other, " zyxw")) > 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "it holds no tokenizer"),
        (byte_level("tekken"), "the pre-tokenizer 'tekken' is not known here"),
        (byte_level("gpt-2", model="bert"), "its tokenizer 'bert' is not known here"),
        (byte_level("gpt-2", merges=None), "tokenizer.ggml.merges is missing"),
        (byte_level("gpt-2", merges=["zz yy"]), "its tokenizer cannot be made"),
        (sentencepiece(scores=[1.0]), "its tokenizer cannot be made"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_a_warning_that_says_why(tmp_path, metadata, said):
    tokenizer, warnings = written(tmp_path, metadata)
    assert tokenizer is None
    assert len(warnings) == 1
    assert said in warnings[0]
    assert str(tmp_path / "x.gguf") in warnings[0]
    assert "the model takes token ids only" in warnings[0]
    assert "\n" not in warnings[0]


def test_a_converted_file_chats_with_its_own_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    metadata = byte_level("smollm") | {"tokenizer.chat_template": template}
    report = convert(write_small(tmp_path / "x.gguf", metadata=metadata), tmp_path / "out")
    assert report.warnings == ()
    chat, tokenizer = load_chat_template(tmp_path / "out"), load_tokenizer(tmp_path / "out")
    assert chat is not None
    assert tokenizer is not None
    prompt = chat.render([{"role": "user", "content": "fox"}])
    assert prompt == "<|im_start|>fox<|im_end|>"
    ids = ids_of(tokenizer, prompt, special=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert decode(tokenizer, ids) == "fox"
