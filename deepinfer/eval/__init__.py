"""What a model can do, measured through an engine: right answers per task and distance, and perplexity."""

from deepinfer.eval.items import EvalItem, load_items, task_names
from deepinfer.eval.measure import EvalReport, RowResult, evaluate

__all__ = ["EvalItem", "EvalReport", "RowResult", "evaluate", "load_items", "task_names"]
