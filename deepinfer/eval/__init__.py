"""What a model can do: questions with known answers, asked through an engine."""

from deepinfer.eval.building import watched_llm
from deepinfer.eval.items import EvalItem, load_items, task_names
from deepinfer.eval.measure import evaluate, right_answers
from deepinfer.eval.report import EvalReport, Internals, RowResult

__all__ = [
    "EvalItem",
    "EvalReport",
    "Internals",
    "RowResult",
    "evaluate",
    "load_items",
    "right_answers",
    "task_names",
    "watched_llm",
]
