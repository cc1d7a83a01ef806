"""Stop strings: the same end however the text is cut, nothing of it shown, nothing held that could not be one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deepinfer.errors import ArgumentError
from deepinfer.tokenizer import OutputText, StopStringMatcher, Tokenizer

TEXT = "xxENDyy"
STOP_SETS = [
    ("END",),
    ("ENDy",),
    ("N",),
    ("DD",),
    ("END", "ENDy"),
    ("ENDy", "END"),
    ("xEN", "END"),
    ("NDy", "END"),
    ("END", "N"),
    ("D", "END", "ND"),
    ("DD", "ENDz", "yyy"),
    ("x",),
    ("xx",),
    ("xxENDyy",),
    ("y", "yy"),
    ("zz",),
    (),
]


def cuts(text: str) -> Iterator[list[str]]:
    for count in range(len(text)):
        for places in itertools.combinations(range(1, len(text)), count):
            edges = (0, *places, len(text))
            yield [text[a:b] for a, b in itertools.pairwise(edges)]


def expected(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """Read character by character; at the first that completes stop strings, the longest of them ends the text."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOP_SETS)
@pytest.mark.parametrize("text", [TEXT, "xxEN", "ENENDEND", "xéN漢END"])
def test_every_cut_ends_the_text_at_the_same_place(text: str, stops: tuple[str, ...], *, include: bool) -> None:
    wanted = expected(text, stops, include=include)
    for pieces in cuts(text):
        matcher = StopStringMatcher(stops, include_stop=include)
        shown, read, stop = "", "", None
        for piece in pieces:
            match = matcher.add(piece)
            shown += match.text
            read += piece
            stop = stop or match.stop
            assert wanted[0].startswith(shown)
            if stop is None:
                held = read[len(shown) :]
                assert any(other != held and other.startswith(held) for other in stops) or not held
        shown += matcher.finish()
        assert (shown, stop) == wanted


@pytest.mark.parametrize(
    ("stops", "shown", "stop"),
    [
        (("xEN", "END"), "x", "xEN"),
        (("END", "NDy"), "xx", "END"),
        (("END", "N"), "xxE", "N"),
        (("D", "END", "ND"), "xx", "END"),
    ],
)
def test_the_stop_completed_first_counts_and_among_equals_the_longest(
    stops: tuple[str, ...], shown: str, stop: str
) -> None:
    match = StopStringMatcher(stops).add(TEXT)
    assert (match.text, match.stop) == (shown, stop)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    matcher = StopStringMatcher(["END"])
    assert [matcher.add(piece).text for piece in ("abcE", "N", "xE", "E", "y")] == ["abc", "", "ENx", "E", "Ey"]


def test_held_text_is_released_once_at_the_end() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.add("abEN").text == "ab"
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.add("aENDb").text == "a"
    assert matcher.add("c").text == ""
    assert matcher.add("END") == matcher.add("")
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ArgumentError, match="empty"):
        StopStringMatcher(["a", ""])


def test_stops_before_the_least_length_are_passed_over_but_one_completed_after_it_counts() -> None:
    matcher = StopStringMatcher(["END", "N"])
    assert matcher.add("N", may_stop=False) == StopStringMatcher([]).add("N")
    assert matcher.add("aEN", may_stop=False).text == "a"
    match = matcher.add("D")
    assert (match.text, match.stop) == ("", "END")


def test_a_passed_over_stop_is_not_found_again() -> None:
    matcher = StopStringMatcher(["EN", "ENDE"])
    assert matcher.add("EN", may_stop=False).text == ""
    match = matcher.add("D")
    assert (match.text, match.stop) == ("", None)
    assert matcher.add("x").text == "ENDx"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def test_a_stop_inside_a_character_waits_for_the_whole_character() -> None:
    tokenizer = byte_tokenizer()
    text = OutputText(tokenizer, stop=["é"])
    found = [text.add(token_id) for token_id in tokenizer.encode("xéy")]
    assert found == [None, None, "é", None]
    assert text.text == "x"
    assert text.finish() == "x"


def test_a_stop_that_is_half_of_a_character_is_never_met() -> None:
    # "Ã" is how the first byte of "é" would read on its own.
    tokenizer = byte_tokenizer()
    text = OutputText(tokenizer, stop=["Ã"])
    assert [text.add(token_id) for token_id in tokenizer.encode("xéy")] == [None] * 4
    assert text.finish() == "xéy"


@pytest.mark.parametrize("include", [False, True])
def test_an_answers_text_only_grows_and_equals_its_end(*, include: bool) -> None:
    tokenizer = byte_tokenizer()
    text = OutputText(tokenizer, stop=["漢D"], include_stop=include)
    shown = [""]
    for token_id in tokenizer.encode("a漢b漢Dz"):
        text.add(token_id)
        assert text.text.startswith(shown[-1])
        shown.append(text.text)
    assert text.finish() == shown[-1] == ("a漢b漢D" if include else "a漢b")


def test_the_end_of_an_answer_releases_the_held_text_and_then_the_open_character() -> None:
    tokenizer = byte_tokenizer()
    text = OutputText(tokenizer, stop=["END"])
    for token_id in tokenizer.encode("aENé")[:-1]:
        text.add(token_id)
    assert text.text == "a"
    assert text.finish() == "aEN\ufffd"
    assert text.finish() == "aEN\ufffd"
