"""How values are written for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns, two spaces apart, under a ruled header; the last column is never padded."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [lines[0], rule, *lines[1:]]
    )


def pretty_json(value: object) -> str:
    """Return indented JSON for a report."""
    return json.dumps(value, indent=2)


def line_json(value: object) -> str:
    """Return JSON on one line."""
    return json.dumps(value, separators=(", ", ": "))


def printable(text: str) -> str:
    r"""Return ``text`` with control characters written as escapes, newlines and tabs kept.

    A model's text is data: an escape sequence in it must not reach the terminal.
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def binary_size(num_bytes: int) -> str:
    """Return a size in the largest binary unit that keeps it at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def percent(share: float) -> str:
    """Return a share as per cent with one decimal."""
    return f"{100 * share:.1f} %"
