"""A hybrid model of a few thousand random weights in a Hugging Face folder, with a tokenizer and a chat template."""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.checkpoints_convert.folders import Tensors, config_of, random_tensors, write

TEXT = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!\n"
    "Der Käse, die Brücke und das Gemüse. Ça va très bien. 日本語の文章です。 Smile 😀🙂, wave 👋.\n"
)
TEMPLATE = (
    "{% for message in messages %}\n<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 320
EOS, TURN_END = 0, 2
MAX_POSITIONS = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny(folder: Path, *, mtp: bool = True, max_positions: int = MAX_POSITIONS, heads: int = 4) -> Path:
    """One delta layer and one attention layer; norms and biases away from neutral."""
    config = config_of(
        "dense",
        vocab_size=VOCAB,
        max_position_embeddings=max_positions,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        full_attention_interval=2,
        eos_token_id=EOS,
        mtp_num_hidden_layers=1 if mtp else None,
    )
    config["tie_word_embeddings"] = False
    write(folder, config, _calmed(random_tensors(config)))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, TURN_END]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 3 special tokens, 256 bytes and a few merges, so that many characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def _calmed(tensors: Tensors) -> Tensors:
    """Matrices scaled by their width, vectors made small, so that activations keep their size."""
    return {
        name: (value * np.asarray(1.5 * value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3)).astype(value.dtype)
        for name, value in tensors.items()
    }
