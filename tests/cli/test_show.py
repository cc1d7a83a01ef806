"""Tables, sizes and text that is safe to write to a terminal."""

from __future__ import annotations

import pytest

from deepinfer.cli import show


def test_columns_line_up_and_lines_have_no_trailing_spaces() -> None:
    text = show.table(("op", "driver"), [("a.long_name", "x"), ("b", "longer")])
    assert text == "op           driver\n-----------  ------\na.long_name  x\nb            longer"


def test_an_escape_sequence_of_the_model_never_reaches_the_terminal() -> None:
    assert show.printable("a\x1b[2Jb\r\x07\tc\nd\u202e\u00e9") == "a\\x1b[2Jb\\r\\x07\tc\nd\\u202e\u00e9"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (2**40, "1024.0 GiB")],
)
def test_sizes_use_the_largest_unit_that_fits(num_bytes: int, text: str) -> None:
    assert show.binary_size(num_bytes) == text


def test_a_json_line_is_one_line() -> None:
    assert show.line_json({"text": "a\nb"}) == '{"text": "a\\nb"}'
