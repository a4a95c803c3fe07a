"""The checkpoint's tokenizer: text to ids, ids to bytes (no HTTP framework here; the offline API uses it too)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from bireme.errors import ConfigError, InvalidRequestError
from bireme.types import find_surrogate

MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that carry the structure of a chat answer: kept in its text even where a tokenizer calls them special."""

_SHORT_CHARACTERS = 2048

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A byte-level BPE ``tokenizer.json``.

    Attributes:
        token_bytes: the bytes of each id, by id; None for an id without a token.
        special_ids: ids of added tokens that the tokenizer calls special.
        markup_ids: ids of MARKUP_TOKENS.
        chat_template: the Jinja source, or None when the checkpoint has none.
        special_tokens: bos_token, eos_token and so on, as far as the checkpoint names them (templates use them).
    """

    def __init__(
        self, fast: FastTokenizer, *, chat_template: str | None = None, special_tokens: dict[str, str] | None = None
    ) -> None:
        decoder = json.loads(fast.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise ConfigError(
                f"cannot use tokenizer.json: its decoder is {decoder.get('type')!r}, and only byte-level BPE "
                "('ByteLevel') is decoded here"
            )
        self._fast = fast
        fast.no_truncation()
        fast.no_padding()
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        added = fast.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.markup_ids = frozenset(token_id for token_id, token in added.items() if token.content in MARKUP_TOKENS)
        vocab = fast.get_vocab(with_added_tokens=True)
        self.token_bytes: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            self.token_bytes[token_id] = _bytes_of(token)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, with special tokens and the chat template of its neighbours.

        ``chat_template.jinja`` is preferred to the template inside ``tokenizer_config.json``.

        Raises:
            ConfigError: a file is missing or cannot be read; names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"cannot load the tokenizer: {path} does not exist")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(f"cannot load the tokenizer: {path}: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        template_path = folder / "chat_template.jinja"
        if template_path.is_file():
            try:
                template: str | None = template_path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot load the tokenizer: {template_path}: {error}") from error
        else:
            template = _template_of(config.get("chat_template"), folder)
        special = {
            name: _content_of(name, config[name], folder) for name in _NAMED_TOKENS if config.get(name) is not None
        }
        return cls(fast, chat_template=template, special_tokens=special)

    @property
    def num_ids(self) -> int:
        """One more than the largest id that has a token."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written out in it become their ids. Long texts leave the GIL to others.

        Raises:
            InvalidRequestError: the text is no valid Unicode (bytes that Python could not decode reach it like that).
        """
        position = find_surrogate(text)
        if position is not None:
            raise InvalidRequestError(
                f"the prompt holds a lone surrogate at character {position}: it is not valid Unicode", "prompt"
            )
        if len(text) <= _SHORT_CHARACTERS:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        # The library releases the GIL only in its batch functions.
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where in ``text`` each of its tokens begins, also where the tokenizer rewrites it (NFC) or adds tokens."""
        starts, end = [], 0
        for start, stop in self._fast.encode(text, add_special_tokens=add_special_tokens).offsets:
            # An added token stands for no text: it is where the one before it ended.
            starts.append(start if stop > start else end)
            end = max(end, stop)
        return starts

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id (empty for an id without a token)."""
        if 0 <= token_id < len(self.token_bytes):
            return self.token_bytes[token_id] or b""
        return b""

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.bytes_of(token_id) for token_id in token_ids if token_id not in skipped)
        return joined.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        r"""One id as a string for a list of log-probabilities: its text, or ``bytes:\x..`` where it is no whole text.

        The second form is OpenAI's; it keeps the keys of different tokens different.
        """
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _byte_characters() -> dict[str, int]:
    """How byte-level BPE writes bytes: printable characters stand for themselves, the rest come from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        # An added token that holds a character outside the byte alphabet stands for itself.
        return token.encode("utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer: {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot load the tokenizer: {path} holds no JSON object")
    return content


def _content_of(name: str, token: Any, folder: Path) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise _no_config(folder, f"{name} is {token!r}: it must be a string, or an object with content")
    return content


def _template_of(value: Any, folder: Path) -> str | None:
    """A template is a string, or a list of named ones of which "default" is the chat's."""
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise _no_config(
                    folder,
                    f"chat_template holds {entry!r}: it must be a string, or a list of objects with name and template",
                )
    return named.get("default")


def _no_config(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"cannot load the tokenizer: {folder / 'tokenizer_config.json'}: {what}")
