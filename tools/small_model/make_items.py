"""Makes the test items that come with the package.

Run from the root of the repository:

    python -m tools.small_model.make_items deepinfer/eval/items.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .skills import row_of
from .world import held_out_items

SEED, COUNT = 2026, 16


def items_text(seed: int = SEED, count: int = COUNT) -> str:
    """Give the file's text: one item a line."""
    items = sorted(held_out_items(seed, count), key=lambda item: (item.task, row_of(item)[1]))
    lines = []
    for item in items:
        task, distance = row_of(item)
        line = {"task": task, "distance": distance, "prompt": item.prompt, "answer": item.answer}
        lines.append(json.dumps(line, ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    """Write the file that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the items, default {SEED}")
    parser.add_argument("--count", type=int, default=COUNT, help=f"items of a row, default {COUNT}")
    arguments = parser.parse_args()
    arguments.file.write_text(items_text(arguments.seed, arguments.count), encoding="utf-8")


if __name__ == "__main__":
    main()
