"""The tokenizer: what it loads, what it refuses, and text that grows without splitting or repeating a character."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from deepinfer.errors import TokenizerError
from deepinfer.tokenizer import IncrementalDetokenizer, Tokenizer
from deepinfer.tokenizer.byte_alphabet import bytes_of_token

SPELLING = {bytes_of_token(character): character for character in pre_tokenizers.ByteLevel.alphabet()}
MIXED = "aé漢😀e\u0301"


def spell(data: bytes) -> str:
    return "".join(SPELLING[bytes([byte])] for byte in data)


def byte_level(pieces: Sequence[bytes] = ()) -> tokenizers.Tokenizer:
    """A byte-level vocabulary: every byte at its own id, then the pieces, then two added tokens."""
    entries = [bytes([byte]) for byte in range(256)] + [piece for piece in dict.fromkeys(pieces) if len(piece) > 1]
    backend = tokenizers.Tokenizer(models.BPE(vocab={spell(data): i for i, data in enumerate(entries)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<think é>", special=False)])
    return backend


def substrings(data: bytes) -> list[bytes]:
    return [data[start:stop] for start, stop in itertools.combinations(range(len(data) + 1), 2)]


def segmentations(backend: tokenizers.Tokenizer, data: bytes) -> Iterator[list[int]]:
    for count in range(len(data)):
        for cuts in itertools.combinations(range(1, len(data)), count):
            edges = (0, *cuts, len(data))
            yield [backend.token_to_id(spell(data[a:b])) for a, b in itertools.pairwise(edges)]


def deltas(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def test_every_segmentation_of_characters_of_every_width_gives_the_text() -> None:
    data = MIXED.encode()
    backend = byte_level(substrings(data))
    tokenizer = Tokenizer(backend)
    for ids in segmentations(backend, data):
        pieces = deltas(IncrementalDetokenizer(tokenizer), ids)
        assert "".join(pieces) == MIXED
        assert pieces[-1] == ""
        assert all(MIXED.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_invalid_bytes_and_added_tokens_anywhere_give_the_whole_decode() -> None:
    generator = random.Random(3)
    pieces = [bytes(generator.choices(range(256), k=generator.randint(2, 5))) for _ in range(60)]
    pieces += substrings("é漢😀".encode())
    backend = byte_level(pieces)
    tokenizer = Tokenizer(backend)
    lead_bytes = [0xC3, 0xE6, 0xED, 0xF0, 0xF4, 0x80, 0xA0, 0xBF, 0x90]
    for trial in range(4000):
        pool = lead_bytes if trial % 2 else range(backend.get_vocab_size())
        ids = generator.choices([*pool, *range(256, backend.get_vocab_size())], k=generator.randint(0, 12))
        for skip in (True, False):
            whole = backend.decode(ids, skip_special_tokens=skip)
            assert "".join(deltas(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), ids)) == whole
            assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


def test_an_incomplete_tail_is_held_and_flushed_once() -> None:
    tokenizer = Tokenizer(byte_level())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add(byte) for byte in "x😀".encode()[:4]] == ["x", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_character_around_a_hidden_special_token_is_joined_and_around_a_shown_one_is_not() -> None:
    backend = byte_level()
    tokenizer = Tokenizer(backend)
    first, second = "é".encode()
    ids = [first, backend.token_to_id("<|end|>"), second]
    assert deltas(IncrementalDetokenizer(tokenizer), ids) == ["", "", "é", ""]
    assert "".join(deltas(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids)) == "\ufffd<|end|>\ufffd"


def test_a_prompt_that_ends_inside_a_character_never_shows_its_text() -> None:
    tokenizer = Tokenizer(byte_level())
    prompt, answer = b"hello \xf0\x9f", b"\x98\x80 x"
    alone = IncrementalDetokenizer(tokenizer)
    assert "".join(deltas(alone, list(answer))) == tokenizer.decode(list(answer)) == "\ufffd\ufffd x"
    continued = IncrementalDetokenizer(tokenizer, prompt_token_ids=list(prompt))
    assert deltas(continued, list(answer)) == ["", "😀", " ", "x", ""]


@pytest.mark.parametrize("cut", range(len("né漢😀".encode()) + 1))
def test_a_continued_answer_completes_the_prompts_text_exactly(cut: int) -> None:
    data = "né漢😀".encode()
    continued = IncrementalDetokenizer(Tokenizer(byte_level()), prompt_token_ids=list(data[:cut]))
    shown = data[:cut].decode("utf-8", errors="ignore")
    assert shown + "".join(deltas(continued, list(data[cut:]))) == "né漢😀"


def test_ids_without_an_entry_are_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([ord("a"), 5000, ord("b")]) == "ab"
    assert "".join(deltas(IncrementalDetokenizer(tokenizer), [ord("a"), 5000, ord("b")])) == "ab"


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(TokenizerError, match="-1 is negative"):
        Tokenizer(byte_level()).decode([-1])


def test_text_goes_to_ids_and_back() -> None:
    tokenizer = Tokenizer(byte_level())
    text = "line\n\ttab  é漢😀 \x00 \ufeff"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_special_tokens_in_text_become_themselves_and_are_left_out_of_text() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a<|end|>b")
    assert ids[1] in tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_the_vocabulary_counts_added_tokens() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_token_ids == {256}


def test_a_lone_surrogate_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate \('\\ud83d' at character 1\)"):
        Tokenizer(byte_level()).encode("a\ud83d")


def test_a_file_loads_and_its_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello") == list(b"hello")


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


def test_an_absent_file_is_refused_when_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "Strange"}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])]
)
def test_a_decoder_that_is_not_byte_level_is_refused(decoder: decoders.Decoder | None) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer(backend)


def test_a_sequence_of_the_one_decoder_is_byte_level() -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(backend).decode([ord("a")]) == "a"
