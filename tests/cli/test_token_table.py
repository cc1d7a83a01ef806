"""The table of an answer's tokens."""

from __future__ import annotations

import math

from deepinfer.cli.token_table import token_table
from deepinfer.engine.outputs import CompletionOutput

WORDS = {3: " the", 5: "\n", 7: "\x1b[2J"}


def answer() -> CompletionOutput:
    entries = (
        {3: math.log(0.25), 7: math.log(0.125), 5: math.log(0.125)},
        {5: 0.0},
    )
    return CompletionOutput(0, " the\n", (3, 5), entries, "length")


def test_every_token_has_a_line_with_its_chance_and_the_others_best_first_ties_by_id() -> None:
    lines = token_table(answer(), WORDS.__getitem__).splitlines()
    assert lines[0].split() == ["#", "token", "id", "log-prob", "chance", "others"]
    assert len(lines) == 4
    assert lines[2].split("  ")[0] == "0"
    assert '" the"' in lines[2]
    assert "-1.3863" in lines[2]
    assert "25.00 %" in lines[2]
    assert lines[2].index('"\\n" 12.50 %') < lines[2].rindex("12.50 %")
    assert lines[3].endswith("100.00 %")


def test_control_characters_of_a_token_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in token_table(answer(), WORDS.__getitem__)


def test_without_a_tokenizer_ids_stand_alone() -> None:
    line = token_table(answer(), None).splitlines()[2]
    assert "5 12.50 %  7 12.50 %" in line
