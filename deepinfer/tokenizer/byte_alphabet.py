"""The alphabet in which byte-level vocabularies spell bytes: one printable character per byte."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_FIRST_STAND_IN = 0x100


def _spelling() -> dict[str, int]:
    # Bytes that print stand for themselves; the others, in ascending order, take the characters from U+0100 on.
    stand_ins = (byte for byte in range(0x100) if byte not in _PRINTABLE)
    return {chr(byte): byte for byte in _PRINTABLE} | {
        chr(_FIRST_STAND_IN + place): byte for place, byte in enumerate(stand_ins)
    }


_BYTE_OF_CHARACTER = _spelling()


def bytes_of_token(token: str) -> bytes:
    """Return the bytes that a vocabulary entry spells.

    An entry with any character outside the alphabet (an added token such as ``<|end of text|>``) is plain text.
    """
    spelled = [_BYTE_OF_CHARACTER.get(character) for character in token]
    known = [byte for byte in spelled if byte is not None]
    return bytes(known) if len(known) == len(spelled) else token.encode("utf-8")
