"""A wrapper around the `tokenizers` library that knows the bytes of every token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import tokenizers

from deepinfer.errors import TokenizerError
from deepinfer.tokenizer.byte_alphabet import bytes_of_token

FILE_NAME = "tokenizer.json"


class Tokenizer:
    """Text to ids and back, by one byte-level ``tokenizer.json``.

    Only byte-level vocabularies are accepted: there each token is a fixed string of bytes, so text can be handed out
    while it grows without ever taking a character back.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str = "a tokenizer") -> None:
        """Wrap a loaded tokenizer.

        Args:
            backend: the library's tokenizer; its truncation and padding are switched off, because a prompt that is
                silently cut gives a wrong answer.
            source: what to call it in errors.

        Raises:
            TokenizerError: if its decoder is not byte-level.
        """
        decoder = _decoder_types(backend)
        if decoder != ["ByteLevel"]:
            raise TokenizerError(
                f"{source}: its decoder is {' + '.join(decoder) or 'absent'}; DeepInfer decodes byte-level tokenizers "
                f"(decoder 'ByteLevel'). Convert it, or remove the file and work with token ids"
            )
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, directory: str | PathLike[str]) -> Tokenizer | None:
        """Load a checkpoint's tokenizer; None if the directory has none, so that it takes token ids only."""
        path = Path(directory) / FILE_NAME
        return cls.from_file(path) if path.exists() else None

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Tokenizer:
        """Load one ``tokenizer.json``.

        Raises:
            TokenizerError: if it is absent, cannot be read, or is not byte-level.
        """
        path = Path(path)
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist; without it the model takes and gives token ids only")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
        return cls(backend, str(path))

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included; a model's vocabulary may be padded beyond it."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are control marks and not text."""
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any text; names of special tokens in it become those tokens.
            add_special_tokens: let the tokenizer add what its file says belongs around a text.

        Raises:
            TokenizerError: if the text holds a lone surrogate, which no encoding can express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has a lone surrogate ({text[error.start]!r} at character {error.start}), which is not a "
                f"character; remove it"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole list of ids; invalid bytes become U+FFFD, ids without an entry are nothing.

        Raises:
            TokenizerError: if an id is negative.
        """
        hidden = self._special_ids if skip_special_tokens else frozenset()
        shown = [self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden]
        return b"".join(shown).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id without an entry (a padded vocabulary has such ids).

        Raises:
            TokenizerError: if the id is negative.
        """
        known = self._bytes.get(token_id)
        if known is None:
            if token_id < 0:
                raise TokenizerError(f"token id {token_id} is negative; ids start at 0")
            token = self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else bytes_of_token(token)
        return known


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    description = json.loads(backend.decoder.__getstate__())
    return [each["type"] for each in description.get("decoders", [description])]
