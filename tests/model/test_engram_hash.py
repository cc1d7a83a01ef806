"""Engram's hash: the released layout, the golden rows, and the rules at the edges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer.errors import ArgumentError, ConfigurationError
from deepinfer.model.checkpoint import packaged_model_path
from deepinfer.model.engram_hash import engram_layouts, engram_rows_reference, normalise_text, token_map
from deepinfer.model.presets import preset

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "engram_hash_tiny8.json").read_text())
TINY8 = preset("tiny8")


class FakeTokenizer:
    """Ids 0.. stand for the given texts; the raw string of id i is ``raw<i>``."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:
        return len(self.texts)

    def id_to_token(self, id: int) -> str | None:
        return f"raw{id}"

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(self.texts[token] for token in ids)


def test_the_released_layout_has_the_published_primes_and_multipliers() -> None:
    first, second = engram_layouts(preset("v41-flash"))
    assert (first.primes[0], first.primes[-1], first.num_rows) == (16000057, 16000463, 384006168)
    assert (second.primes[0], second.primes[-1], second.num_rows) == (16000477, 16000889, 384016682)
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert len(set(first.primes + second.primes)) == 48
    assert first.offsets[:3] == (0, 16000057, 16000057 + 16000079)


def test_the_golden_rows_are_reproduced() -> None:
    golden = np.array(GOLDEN["rows"])
    for index in range(2):
        rows = engram_rows_reference(GOLDEN["ids"], None, TINY8, index)
        np.testing.assert_array_equal(rows, golden[:, index])


def test_every_column_stays_inside_its_part_of_the_table() -> None:
    for index, layout in enumerate(engram_layouts(TINY8)):
        rows = engram_rows_reference(GOLDEN["ids"], None, TINY8, index)
        lower = np.array(layout.offsets)
        assert (rows >= lower).all()
        assert (rows < lower + np.array(layout.primes)).all()


def test_a_row_depends_on_three_earlier_ids_and_no_more() -> None:
    ids = GOLDEN["ids"]
    changed = [(ids[0] + 1) % 512, *ids[1:]]
    rows = engram_rows_reference(ids, None, TINY8, 0)
    other = engram_rows_reference(changed, None, TINY8, 0)
    differs = (rows != other).any(axis=1)
    assert differs[:4].all()
    assert not differs[4:].any()


def test_an_image_row_reads_nothing_and_hides_what_lies_before_it() -> None:
    ids = list(GOLDEN["ids"][:8])
    mask = [position in (3, 4) for position in range(8)]
    rows = engram_rows_reference(ids, mask, TINY8, 0)
    assert (rows[3:5] == -1).all()
    # A barrier is like the start of the text: what follows hashes as if the ids before were not there.
    restarted = engram_rows_reference(ids[5:], None, TINY8, 0)
    np.testing.assert_array_equal(rows[5:], restarted)
    np.testing.assert_array_equal(rows[:3], engram_rows_reference(ids[:3], None, TINY8, 0))


def test_the_hash_sees_compressed_ids() -> None:
    mapping = np.arange(512)
    mapping[7] = 5
    ours = engram_rows_reference([5, 7, 7], None, TINY8, 0, mapping)
    np.testing.assert_array_equal(ours, engram_rows_reference([5, 5, 5], None, TINY8, 0, mapping))


def test_bad_arguments_are_reported_together() -> None:
    with pytest.raises(ArgumentError) as caught:
        engram_rows_reference([1, 512], [True], TINY8, 2)
    assert len(caught.value.problems) == 3


def test_the_map_is_the_identity_if_the_sizes_are_equal_tokenizer_or_not() -> None:
    np.testing.assert_array_equal(token_map(None, TINY8), np.arange(512))
    np.testing.assert_array_equal(token_map(FakeTokenizer(["a"] * 512), TINY8), np.arange(512))


def test_a_map_that_needs_a_tokenizer_says_so() -> None:
    config = dataclasses.replace(TINY8, engram_compressed_vocab_size=400)
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        token_map(None, config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", "hello"),
        (" The", "the"),
        ("É", "e"),
        ("ﬁ", "fi"),  # compatibility form
        ("Ａ", "a"),  # noqa: RUF001  # full width
        ("কা", "ক"),  # a spacing vowel sign is a combining mark too
        ("ΑΣ", "ασ"),  # noqa: RUF001  # no special final sigma
        ("a \t\r\n b", "a b"),
        (" ", " "),
        ("\n\n\t", " "),
        ("\u3000x\u2003", "x"),
        ("", ""),
    ],
)
def test_texts_are_folded_by_width_accent_case_and_space(text: str, expected: str) -> None:
    assert normalise_text(text) == expected


def test_ids_share_a_number_by_folded_text_in_first_seen_order() -> None:
    texts = ["<s>", " the", "The", "THE ", "\ufffd", "\ufffd", "\u0301", " ", "\n", "é", "e"]
    config = dataclasses.replace(
        TINY8,
        vocab_size=len(texts),
        engram_compressed_vocab_size=7,
        image_token_id=3,
        dspark_noise_token_id=4,
    )
    # A lone accent folds to nothing and so keeps its own text; broken bytes keep their raw strings.
    assert token_map(FakeTokenizer(texts), config).tolist() == [0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 6]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    config = dataclasses.replace(TINY8, engram_compressed_vocab_size=400)
    with pytest.raises(ConfigurationError, match="give 1 compressed ids and engram_compressed_vocab_size is 400"):
        token_map(FakeTokenizer(["a"] * 512), config)
    with pytest.raises(ConfigurationError, match="the tokenizer has 3 ids and the configuration 512"):
        token_map(FakeTokenizer(["a"] * 3), config)


def test_a_real_tokenizer_backend_can_be_mapped() -> None:
    backend = Tokenizer.from_file(str(packaged_model_path() / "tokenizer.json"))
    config = dataclasses.replace(preset("small"), engram_compressed_vocab_size=1039)
    mapping = token_map(backend, config)
    for one, other in (("the", " the"), ("T", "t")):
        assert mapping[backend.encode(one).ids[0]] == mapping[backend.encode(other).ids[0]]
    assert mapping[:3].tolist() == [0, 1, 2]
