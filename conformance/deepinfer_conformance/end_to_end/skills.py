"""L5: what the small model can do on the driver, beside what it can do on the reference.

The questions are those of ``deepinfer eval``. A driver may round its way to another answer where two tokens are nearly
as likely, but not often: of what the reference answers right, one answer in twenty may be wrong, or a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepinfer.eval import EvalItem, load_items, right_answers
from deepinfer.eval.items import PERPLEXITY_TASK
from deepinfer.llm import LLM
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.end_to_end.engines import make_engine
from deepinfer_conformance.outcomes import Finding

LARGEST_SHARE_LOST = 0.05
LARGEST_SHARE_UNKNOWN = 0.5
_QUICK_DISTANCE, _POSITIONS = 100, 1600


def skills(bench: Bench, case: Case) -> Sequence[Finding]:
    """Ask the same questions on both, greedily."""
    per_row = int(str(case.facts["items"]))
    items = questions(per_row, most_distance=_QUICK_DISTANCE if case.profile == "quick" else None)
    mine, theirs = (
        right_answers(
            LLM.from_engine(
                make_engine(
                    driver, case.options, num_blocks=4 * _POSITIONS // 8, max_num_batched_tokens=256,
                    max_model_len=_POSITIONS,
                )
            ),
            items,
        )
        for driver in (bench.driver, bench.reference)
    )  # fmt: skip
    known, lost = sum(theirs), sum(there and not here for here, there in zip(mine, theirs, strict=True))
    bound = max(1.0, LARGEST_SHARE_LOST * known)
    rows = rows_of(items, mine, theirs)
    detail = ", ".join(f"{row} {right} and {reference} of {asked}" for row, (right, reference, asked) in rows.items())
    return [
        Finding("answers lost", float(lost), bound, f"driver and reference: {detail}", data=rows),
        Finding(
            "share that the reference does not know",
            1.0 - known / len(items),
            LARGEST_SHARE_UNKNOWN,
            "a model that knows nothing has nothing to lose: the packaged checkpoint is not the trained one",
        ),
    ]


def questions(per_row: int, *, most_distance: int | None) -> tuple[EvalItem, ...]:
    """Return items that are right or wrong, of every task and distance up to one."""
    return tuple(
        item
        for item in load_items(limit=per_row)
        if item.task != PERPLEXITY_TASK and (most_distance is None or item.distance <= most_distance)
    )


def rows_of(items: Sequence[EvalItem], mine: Sequence[bool], theirs: Sequence[bool]) -> Mapping[str, list[int]]:
    """Return of each row of the table how many the driver and the reference answered right, and how many there are."""
    rows: dict[str, list[int]] = {}
    for item, here, there in zip(items, mine, theirs, strict=True):
        row = rows.setdefault(f"{item.task} {item.distance}" if item.distance else item.task, [0, 0, 0])
        for place, count in enumerate((here, there, True)):
            row[place] += count
    return rows
