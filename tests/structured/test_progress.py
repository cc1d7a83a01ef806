"""An answer's place in its form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.sampling.grammar import progress as progress_module
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.sampling.grammar.progress import GrammarProgress, Phase

Begin = Callable[..., GrammarProgress]
Token = Callable[[str], int]
Allowed = Callable[..., list[set[int]]]

END, VOCAB_SIZE = 1, 140
EVERYTHING = set(range(VOCAB_SIZE))


def test_only_what_continues_the_form_is_allowed_and_the_end_only_where_it_is_complete(
    begin: Begin, token: Token, allowed: Allowed
) -> None:
    progress = begin(regex="(ab)*c")
    assert allowed(progress) == [{token("a"), token("c"), token("ab"), token("abc")}]
    progress.commit(token("ab"))
    assert not progress.is_complete
    progress.commit(token("c"))
    assert progress.is_complete
    assert allowed(progress) == [{END}]
    progress.commit(END)
    assert progress.phase is Phase.ENDED
    assert allowed(progress) == [EVERYTHING]


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_form_that_takes_too_long_to_follow_ends_its_answer(
    begin: Begin,
    token: Token,
    monkeypatch: pytest.MonkeyPatch,
    is_fork: bool,  # noqa: FBT001
) -> None:
    """An ambiguous form takes longer with every token; here no computing at all is allowed for."""
    monkeypatch.setattr(progress_module, "ALLOWANCE_S", 0.0)
    monkeypatch.setattr(progress_module, "ALLOWANCE_PER_TOKEN_S", 0.0)
    progress = begin(ebnf='root ::= "a" | root root | root root root')
    with pytest.raises(GrammarError, match="one way only"):
        (progress.copy() if is_fork else progress).commit(token("a"))


def test_padding_and_control_marks_are_never_part_of_a_form(begin: Begin, token: Token, allowed: Allowed) -> None:
    (ids,) = allowed(begin(regex="[^z]*"))
    assert END in ids
    assert token("a") in ids
    assert token("z") not in ids
    assert not {0, 2} & ids
    assert max(ids) < VOCAB_SIZE - 1


def test_a_token_that_the_form_forbids_is_an_error_and_not_the_end_of_the_constraint(
    begin: Begin, token: Token, allowed: Allowed
) -> None:
    progress = begin(regex="ab")
    with pytest.raises(GrammarError, match="forbids"):
        progress.commit(token("b"))


def test_drafts_that_no_text_holds_are_passed_over_in_silence(
    begin: Begin, token: Token, allowed: Allowed, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = begin(regex="(ab)*c")
    assert allowed(progress, (token("c"), 0)) == [*allowed(progress, (token("c"),)), EVERYTHING]
    allowed(progress, (VOCAB_SIZE - 1,))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("count", range(5))
def test_drafts_do_not_move_the_progress(begin: Begin, token: Token, allowed: Allowed, count: int) -> None:
    drafts = (token("ab"), token("a"), token("b"), token("c"), END)[: count + 1]
    progress, untouched = begin(regex="(ab)*c"), begin(regex="(ab)*c")
    rows = allowed(progress, drafts)
    assert len(rows) == count + 2
    assert allowed(progress) == allowed(untouched)
    for draft, row in zip(drafts, rows, strict=False):
        assert row == allowed(untouched)[0]
        untouched.commit(draft)
    assert rows[-1] == allowed(untouched)[0]


def test_behind_a_forbidden_draft_and_behind_the_end_everything_is_allowed(
    begin: Begin, token: Token, allowed: Allowed
) -> None:
    first, second, third, fourth = allowed(begin(regex="ab"), (token("a"), token("z"), token("b")))
    assert (first, second) == ({token("a"), token("ab")}, {token("b")})
    assert third == fourth == EVERYTHING
    assert allowed(begin(regex="ab"), (token("ab"), END))[2] == EVERYTHING


def test_text_is_free_until_the_trigger_was_emitted_in_a_row(begin: Begin, token: Token, allowed: Allowed) -> None:
    progress = begin(regex="ab", trigger_token_ids=[token("x"), token("y")])
    for each in ("x", "x", "z", "y", "x"):
        assert allowed(progress) == [EVERYTHING]
        progress.commit(token(each))
    assert progress.phase is Phase.FREE
    progress.commit(token("y"))
    assert allowed(progress) == [{token("a"), token("ab")}]


def test_a_trigger_among_the_drafts_begins_the_form_behind_it(begin: Begin, token: Token, allowed: Allowed) -> None:
    progress = begin(regex="ab", trigger_token_ids=[token("x")])
    rows = allowed(progress, (token("x"), token("a"), token("b")))
    assert rows == [EVERYTHING, {token("a"), token("ab")}, {token("b")}, {END}]
    assert progress.phase is Phase.FREE
    assert allowed(progress) == [EVERYTHING]


def test_a_bound_token_comes_first_once_and_is_no_part_of_the_form(
    begin: Begin, token: Token, allowed: Allowed
) -> None:
    progress = begin(regex="ab", bound_token_id=token("!"))
    assert allowed(progress, (token("!"), token("a"))) == [{token("!")}, {token("a"), token("ab")}, {token("b")}]
    progress.commit(token("!"))
    assert allowed(progress) == [{token("a"), token("ab")}]
    high = begin(regex="ab", bound_token_id=95)  # the sign bit of its word
    assert allowed(high) == [{95}]


def test_a_copy_goes_its_own_way(begin: Begin, token: Token, allowed: Allowed) -> None:
    progress = begin(regex="(ab)*c", trigger_token_ids=[token("x")])
    progress.commit(token("x"))
    twin = progress.copy()
    twin.commit(token("c"))
    assert twin.is_complete
    assert not progress.is_complete
    assert allowed(progress) == [{token("a"), token("c"), token("ab"), token("abc")}]


def test_a_schema_bounds_the_white_space_it_allows(begin: Begin, token: Token, allowed: Allowed) -> None:
    progress = begin(json_schema={"type": "array", "items": {"type": "boolean"}})
    progress.commit(token("["))
    emitted = 0
    while token(" ") in allowed(progress)[0]:
        progress.commit(token(" "))
        emitted += 1
        assert emitted < 100
    assert allowed(progress) != [set()]
