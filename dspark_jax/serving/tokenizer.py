"""Text to token ids, and the bytes of every token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders

from dspark_jax.config import ConfigError


class TextTokenizer:
    """A byte-level BPE tokenizer: decoding is concatenation of each token's bytes."""

    def __init__(self, tokenizer: Tokenizer, *, bos_token_id: int, adds_bos: bool) -> None:
        """`adds_bos`: plain prompts begin with `bos_token_id`, as chat prompts always do.

        Raises `ConfigError` when the tokenizer is not byte-level.
        """
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ConfigError(
                "tokenizer.json does not decode bytes; only byte-level BPE is supported"
            )
        self._tokenizer = tokenizer
        self._bos = [bos_token_id] if adds_bos else []
        self._bytes = _token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path, *, bos_token_id: int) -> TextTokenizer:
        """Load `tokenizer.json`, and `add_bos_token` of `tokenizer_config.json`, true by default.

        Raises `ConfigError` when a file is missing or unreadable.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"no tokenizer.json in {folder}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        settings_path = folder / "tokenizer_config.json"
        settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
        return cls(
            tokenizer, bos_token_id=bos_token_id, adds_bos=settings.get("add_bos_token", True)
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and ids[: len(self._bos)] != self._bos:
            return self._bos + ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; nothing for an id without an entry in the vocabulary."""
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """The token as API clients see it: `bytes:\\xe2\\x80` where it is no whole text."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the vocabulary entries among `texts`."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i is not None)


class IdTokenizer:
    """Stands in where there is no tokenizer: the text of a token is its number and a space."""

    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ValueError: only a tokenizer makes ids of text."""
        raise ValueError(
            "this server has no tokenizer (--skip-tokenizer-init); send token ids to /v1/completions"
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The number in decimal digits, and a space."""
        return b"%d " % token_id

    def token_text(self, token_id: int) -> str:
        """The same as text."""
        return f"{token_id} "

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """None of them."""
        return frozenset()


Tokens = TextTokenizer | IdTokenizer


def _token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    to_byte = _byte_of_character()
    table = {
        token_id: bytes(to_byte[c] for c in piece)
        for piece, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
        if all(c in to_byte for c in piece)
    }
    added = tokenizer.get_added_tokens_decoder()
    return table | {token_id: token.content.encode() for token_id, token in added.items()}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + position): byte for position, byte in enumerate(others)
    }
