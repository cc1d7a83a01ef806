"""Results as plain values, and back, with a schema that is checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from deepinfer_conformance.outcomes import CaseResult, Level, Outcome

_NUMBERS = ("value", "bound", "reference_error")


def result_as_json(result: CaseResult) -> dict[str, object]:
    """Return one line of ``cases``; infinities and NaN become strings, which JSON has."""
    plain = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    plain["level"] = result.level.name
    plain["outcome"] = str(result.outcome)
    for name in _NUMBERS:
        number = plain[name]
        if isinstance(number, float) and not math.isfinite(number):
            plain[name] = str(number)
    return plain


def result_from_json(plain: Mapping[str, Any]) -> CaseResult:
    """Return the result of one line of ``cases``; the line must have passed :func:`line_problems`."""
    values = dict(plain)
    values["level"] = Level[values["level"]]
    values["outcome"] = Outcome(values["outcome"])
    for name in _NUMBERS:
        if values[name] is not None:
            values[name] = float(values[name])
    return CaseResult(**values)


def line_problems(plain: object, number: int) -> list[str]:
    """Return what is wrong with one line of ``cases``."""
    if not isinstance(plain, Mapping):
        return [f"case {number} is no object"]
    names = {field.name for field in dataclasses.fields(CaseResult)}
    problems = [f"case {number} lacks {name!r}" for name in sorted(names - set(plain))]
    problems += [f"case {number} has the unknown field {name!r}" for name in sorted(set(plain) - names)]
    if plain.get("level") not in Level.__members__:
        problems.append(f"case {number} has level {plain.get('level')!r}")
    if plain.get("outcome") not in {str(outcome) for outcome in Outcome}:
        problems.append(f"case {number} has outcome {plain.get('outcome')!r}")
    for name in _NUMBERS:
        value = plain.get(name)
        if value is not None and not isinstance(value, (int, float)) and value not in ("inf", "-inf", "nan"):
            problems.append(f"case {number} has {name} {value!r}")
    for name in ("id", "op", "check", "input_sha256", "detail"):
        if not isinstance(plain.get(name), str):
            problems.append(f"case {number} has {name} {plain.get(name)!r}")
    return problems
