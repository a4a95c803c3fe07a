"""Trains the pocket model's tokenizer: byte-level BPE in the manner of Qwen, 4,096 tokens in all.

    python pocket/tokenizer.py

Writes ``tokenizer.json`` and ``tokenizer_config.json`` beside the shipped chat template. Takes seconds on a CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from corpus import MODEL_DIR, texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB = 4096
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Special tokens: left out of decoded text."""
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Single tokens that are part of the text, as in Qwen: decoding keeps them, because clients parse them."""

# Words with one leading character that is no letter, digits one by one, runs of symbols, line breaks, spaces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(per_skill: int = 4000, seed: int = 7) -> Tokenizer:
    """A tokenizer whose merges come from ``per_skill`` conversations of each skill."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [*CONTROL, *MARKUP]
    border = re.compile("|".join(map(re.escape, added)))

    def pieces() -> Iterator[str]:
        for text in texts(per_skill, seed):
            yield from border.split(text)

    trainer = BpeTrainer(
        vocab_size=VOCAB - len(added), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(pieces(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens instead of {VOCAB}: too little text")
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the two tokenizer files; the chat template is read from ``directory``."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": t in CONTROL,
            }
            for t in [*CONTROL, *MARKUP]
        },
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": (directory / "chat_template.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    save(train(), MODEL_DIR)
