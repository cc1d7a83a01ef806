"""JSON schemas of which the grammar library would leave something out, without a word.

A user asks for a schema to have answers that are valid: what cannot be enforced is refused, and named. What the library
refuses itself is left to it, and so are annotations. ``oneOf`` counts as ``anyOf``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer.sampling.grammar.expressions import expression_problems

_MOST_PROBLEMS = 5

_NEVER_ENFORCED = (
    *("not", "if", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRING = ("minLength", "maxLength", "pattern")
_ARRAY = ("minItems", "maxItems", "uniqueItems")
_OBJECT = ("minProperties", "maxProperties", "patternProperties", "propertyNames", "required")
# These make a schema without a type one of arrays or objects.
_IS_ARRAY = ("items", "prefixItems", "unevaluatedItems")
_IS_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties")
_NEED_A_TYPE = (*_NUMBER, *_STRING, *_ARRAY, *_OBJECT)
# The first of these that a schema has is all that the library reads of it.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_ASSERTIONS = (*_ALONE, "type", "format", *_NEED_A_TYPE, *_IS_ARRAY, *_IS_OBJECT)

_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def schema_problems(text: str) -> list[str]:
    """Return what in a schema cannot be enforced, in words; empty if everything can, or if it is no schema at all."""
    try:
        whole = json.loads(text)
    except RecursionError:
        return ["it is nested too deeply"]
    except ValueError:
        return []
    problems: list[str] = []
    seen: set[str] = set()
    waiting = [("#", whole)]
    while waiting and len(problems) < _MOST_PROBLEMS:
        place, schema = waiting.pop()
        if place in seen or not isinstance(schema, dict):
            continue
        seen.add(place)
        problems += [f"at {place}: {problem}" for problem in _problems(schema)]
        waiting += _parts(place, schema, whole)
    return problems[:_MOST_PROBLEMS]


def _parts(place: str, schema: Mapping[str, Any], whole: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a schema that bear on its values, each with its place."""
    for name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        if name in schema:
            yield f"{place}/{name}", schema[name]
    if isinstance(schema.get("propertyNames"), dict):
        yield f"{place}/propertyNames", {"type": "string", **schema["propertyNames"]}
    for name in ("properties", "patternProperties"):
        if isinstance(schema.get(name), dict):
            yield from ((f"{place}/{name}/{key}", part) for key, part in schema[name].items())
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            yield from ((f"{place}/{name}/{number}", part) for number, part in enumerate(schema[name]))
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/"):
        found = whole
        for key in target[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        yield target, found


def _problems(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name!r} cannot be enforced" for name in _NEVER_ENFORCED if name in schema)
    if schema.get("uniqueItems") is True:
        yield "'uniqueItems' cannot be enforced"
    target = schema.get("$ref")
    if isinstance(target, str) and target != "#" and not target.startswith("#/"):
        yield f"'$ref' to {target!r} cannot be followed; refer to a place in this schema, '#/...'"
    alone = next((name for name in _ALONE if name in schema), None)
    if alone is not None:
        yield from _ignored_beside(alone, schema)
    else:
        yield from _problems_of_type(schema)


def _ignored_beside(alone: str, schema: Mapping[str, Any]) -> Iterator[str]:
    others = [name for name in _ASSERTIONS if name in schema and name not in (alone, "type")]
    if "type" in schema and not _type_says_nothing_new(alone, schema):
        others.append("type")
    if others:
        yield f"{', '.join(map(repr, others))} beside {alone!r} cannot be enforced"
    if alone == "allOf" and isinstance(schema[alone], list) and len(schema[alone]) != 1:
        yield f"'allOf' of {len(schema[alone])} schemas cannot be enforced; write them as one"


def _type_says_nothing_new(alone: str, schema: Mapping[str, Any]) -> bool:
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    if alone in ("const", "enum"):
        values = [schema[alone]] if alone == "const" else schema[alone]
        return isinstance(values, list) and all(any(_is_of_type(value, name) for name in types) for value in values)
    parts = schema[alone]
    return isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == given for part in parts)


def _is_of_type(value: object, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES.get(str(name), ()))


def _problems_of_type(schema: Mapping[str, Any]) -> Iterator[str]:
    has_type = any(name in schema for name in ("type", *_IS_ARRAY, *_IS_OBJECT))
    if not has_type:
        yield from (f"{name!r} needs a 'type' beside it" for name in _NEED_A_TYPE if name in schema)
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    if "multipleOf" in schema and ("number" in types or any(name in schema for name in _NUMBER[:-1])):
        yield "'multipleOf' can be enforced for type 'integer' without a range only"
    if ("minLength" in schema or "maxLength" in schema) and ("pattern" in schema or "format" in schema):
        yield "a length beside 'pattern' or 'format' cannot be enforced"
    yield from _problems_of_object(schema)
    if isinstance(schema.get("pattern"), str):
        problems = expression_problems(schema["pattern"], is_inside_json=True)
        yield from (f"'pattern' has {problem}" for problem in problems)


def _problems_of_object(schema: Mapping[str, Any]) -> Iterator[str]:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    declared = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    undeclared = [name for name in required if name not in declared] if isinstance(required, list) else []
    if undeclared:
        yield f"'required' names {undeclared[0]!r}, which 'properties' does not; declare it there"
    if declared and "propertyNames" in schema:
        yield "'propertyNames' beside 'properties' cannot be enforced"
    if declared and patterns:
        yield "'patternProperties' beside 'properties' cannot be enforced"
    for expression in patterns if isinstance(patterns, dict) else ():
        problems = expression_problems(expression, is_inside_json=True)
        yield from (f"'patternProperties' {expression!r} has {problem}" for problem in problems)
