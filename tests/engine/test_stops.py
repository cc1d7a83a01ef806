"""Where text ends: stop strings, stop ids, the end token and the cap, and what becomes of text that was held back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

END = 1
PROMPT = [5, 6, 7]


@pytest.fixture
def say(drive) -> Callable[..., Any]:
    """Run one request of the packaged model that says exactly the given text or ids, and return its records.

    ``pieces`` are texts, each made of as few tokens as the tokenizer likes, or token ids.
    """

    def run(*pieces: str | int, **params: Any) -> list[Any]:
        engine = drive(model=None, block_size=16)
        tokenizer = engine.engine.tokenizer
        ids = [token for piece in pieces for token in ([piece] if isinstance(piece, int) else tokenizer.encode(piece))]
        given = {"max_tokens": len(ids), "ignore_eos": True, "golden_token_ids": ids, **params}
        engine.add("a", PROMPT, **given)
        engine.drain()
        records = engine.records["a"]
        texts = [record.outputs[0].text for record in records]
        assert all(later.startswith(sooner) for sooner, later in pairwise(texts))
        return [record.outputs[0] for record in records]

    return run


SPOKEN = "It is cold and there is snow."
LETTERS = tuple(SPOKEN)


@pytest.mark.parametrize("pieces", [(SPOKEN,), LETTERS], ids=["as the tokenizer cuts it", "letter by letter"])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["cold"], "It is ", "cold"),
        (["cold and"], "It is ", "cold and"),
        (["there", "old an", "d"], "It is col", "d"),
        (["is co", "t is"], "I", "t is"),
        (["zebra", "snow!", "snowy"], SPOKEN, None),
        (["snow."], SPOKEN.removesuffix("snow."), "snow."),
        (["I"], "", "I"),
    ],
)
def test_text_ends_before_the_stop_string_that_is_completed_first(say, pieces, stop, text, reason) -> None:
    last = say(*pieces, stop=stop)[-1]
    assert last.text == text
    assert (last.finish_reason, last.stop_reason) == (("stop", reason) if reason else ("length", None))
    included = say(*pieces, stop=stop, include_stop_str_in_output=True)[-1]
    assert included.text == text + (reason or "")
    assert included.token_ids == last.token_ids


def test_no_text_of_a_stop_string_is_ever_shown_and_none_is_held_without_need(say) -> None:
    records = say(*"xxENDyy", stop=["ENDED", "yyy"])
    assert [answer.text for answer in records] == ["x", "xx", "xx", "xx", "xx", "xxEND", "xxENDyy"]


@pytest.mark.parametrize("max_tokens", [4, 5, 6])
def test_a_stop_string_and_the_cap_at_the_same_token_end_with_stop(say, max_tokens) -> None:
    last = say(*"xxENDz", stop=["END"], max_tokens=max_tokens)[-1]
    if max_tokens == 4:
        assert (last.finish_reason, last.stop_reason, last.text) == ("length", None, "xxEN")
    else:
        assert (last.finish_reason, last.stop_reason, last.text) == ("stop", "END", "xx")
    assert len(last.token_ids) == min(max_tokens, 5)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "x"), (4, "x"), (5, "xENDx"), (8, "xENDx"), (9, "xENDxENDx")])
def test_a_stop_string_completed_before_min_tokens_does_not_count(say, min_tokens, text) -> None:
    last = say(*"xENDxENDx", stop=["END"], min_tokens=min_tokens)[-1]
    assert last.text == text
    assert last.finish_reason == ("stop" if text != "xENDxENDx" else "length")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_id_keeps_its_id_and_shows_its_text_only_if_asked(say, include) -> None:
    (letter,) = say("E")[-1].token_ids
    last = say(*"xE", stop_token_ids=[letter], include_stop_str_in_output=include, max_tokens=9)[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", letter)
    assert last.token_ids[-1] == letter
    assert last.text == ("xE" if include else "x")


def test_a_stop_id_whose_text_completes_a_stop_string_ends_as_a_stop_id(say) -> None:
    (letter,) = say("D")[-1].token_ids
    last = say(*"xEND", stop=["END"], stop_token_ids=[letter])[-1]
    assert (last.finish_reason, last.stop_reason, last.text) == ("stop", letter, "xEN")


def test_the_end_token_ends_without_a_stop_reason_and_has_no_text(say) -> None:
    last = say("hello", END, "more", ignore_eos=False, include_stop_str_in_output=True)[-1]
    assert (last.finish_reason, last.stop_reason, last.text, last.token_ids[-1]) == ("stop", None, "hello", END)
    ignoring = say("hello", END, "more")[-1]
    assert (ignoring.finish_reason, ignoring.text) == ("length", "hellomore")


@pytest.mark.parametrize(
    ("pieces", "params", "text"),
    [
        pytest.param("xxEN", {}, "xxEN", id="at the cap"),
        pytest.param("xxEN", {"stop_token_ids": "N"}, "xxE", id="at a stop id"),
        pytest.param((*"xxEN", END), {"ignore_eos": False}, "xxEN", id="at the end token"),
        pytest.param(tuple(b"xx" + b"\xe2\x82"), {}, "xx\ufffd", id="within a character"),
        pytest.param(tuple(b"\xe2\x82\xacEN"), {}, "€EN", id="after a character in pieces"),
        pytest.param(tuple(b"\xe2EN"), {}, "\ufffdEN", id="after bytes that are no character"),
    ],
)
def test_text_that_was_held_back_is_released_once_at_the_end(drive, say, pieces, params, text) -> None:
    tokenizer = drive(model=None).engine.tokenizer
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    ids = [by_bytes[bytes([piece])] if isinstance(piece, int) and piece != END else piece for piece in pieces]
    if "stop_token_ids" in params:
        params = {"stop_token_ids": [by_bytes[params["stop_token_ids"].encode()]]}
    assert say(*ids, stop=["END"], **params)[-1].text == text


def test_an_abort_releases_the_text_that_was_held_back(drive) -> None:
    engine = drive(model=None)
    ids = [token for letter in "xEN" for token in engine.engine.tokenizer.encode(letter)]
    engine.add("a", PROMPT, max_tokens=9, stop=["END"], golden_token_ids=[*ids, *ids, *ids])
    engine.step(3)
    assert engine.answer("a").text == "x"
    engine.engine.abort_request("a")
    engine.drain()
    assert (engine.answer("a").text, engine.answer("a").finish_reason) == ("xEN", "abort")


def test_log_probabilities_stop_with_the_text(say) -> None:
    last = say(*"xxENDyy", stop=["END"], logprobs=1)[-1]
    assert len(last.logprobs) == len(last.token_ids) == 5


def test_stop_strings_without_a_tokenizer_are_refused(drive) -> None:
    engine = drive()
    engine.add("a", PROMPT, stop=["END"])
    engine.drain()
    assert engine.answer("a").finish_reason == "ignored"
    assert "tokenizer.json" in engine.answer("a").message
