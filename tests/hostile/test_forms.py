"""Forms of which the grammar library would quietly make something else: each is refused, and its neighbours are not."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from deepinfer.sampling.grammar import StructuredOutputs
from deepinfer.sampling.grammar.expressions import expression_problems, grammar_problems
from deepinfer.sampling.grammar.schemas import schema_problems

INTEGER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, "#: 'not'"),
        ({"if": INTEGER, "then": {"minimum": 5}}, "'if'"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "items": INTEGER, "contains": {"const": 1}}, "'contains'"),
        ({**POINT, "dependentRequired": {"x": ["y"]}}, "'dependentRequired'"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "'multipleOf'"),
        ({"minimum": 3}, "'minimum' needs a 'type'"),
        ({"type": "object", "required": ["a"]}, "'required' names 'a'"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'required' names 'a'"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, "a length beside 'pattern'"),
        ({"type": "string", "format": "date", "maxLength": 3}, "a length beside"),
        ({"allOf": [POINT, POINT]}, "'allOf' of 2"),
        ({"allOf": [INTEGER], "minimum": 3}, "'minimum' beside 'allOf'"),
        ({"enum": ["a"], "minLength": 5}, "'minLength' beside 'enum'"),
        ({"enum": [1, "a"], "type": "string"}, "'type' beside 'enum'"),
        ({"const": True, "type": "integer"}, "'type' beside 'const'"),
        ({"type": "integer", "anyOf": [{"type": "string"}, INTEGER]}, "'type' beside 'anyOf'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 5}, "'minimum' beside '$ref'"),
        ({"$ref": "https://example.com/schema"}, "cannot be followed"),
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "cannot be followed"),
        ({"$dynamicRef": "#a"}, "'$dynamicRef'"),
        ({**POINT, "propertyNames": {"enum": ["b"]}}, "'propertyNames' beside"),
        ({**POINT, "patternProperties": {"^x": {"type": "string"}}}, "'patternProperties' beside"),
        ({"type": "object", "patternProperties": {'^"$': INTEGER}}, "a JSON string cannot hold"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}},
            "#/properties/a/items: 'not'",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [INTEGER, {"not": {}}]}}}, "#/$defs/a/anyOf/1: 'not'"),
    ],
    ids=str,
)
def test_what_the_library_would_leave_out_of_a_schema_is_named(schema: dict[str, object], words: str) -> None:
    (problem,) = schema_problems(json.dumps(schema))
    assert words in problem


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": ["string", "null"], "enum": ["a", None], "title": "T", "description": "not if", "default": None},
        {"type": "object", "properties": {"not": {"const": 1}, "if": {"enum": [1.0, 2], "type": "integer"}}},
        {"anyOf": [{"$ref": "#"}, {**INTEGER, "minimum": 3}], "$schema": "x", "$defs": {"unused": {"not": {}}}},
        {"type": "string", "anyOf": [{"type": "string", "pattern": '^[^"]{2}$'}, {"type": "string", "format": "date"}]},
        {"items": {"oneOf": [INTEGER, {"type": "null"}]}, "minItems": 1, "uniqueItems": False},
        {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": INTEGER},
        {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}},
    ],
    ids=str,
)
def test_a_schema_that_can_be_enforced_is_let_through(schema: object) -> None:
    assert schema_problems(json.dumps(schema)) == []


def test_a_schema_that_is_none_is_left_to_the_library_but_for_its_depth() -> None:
    assert schema_problems("{bad") == schema_problems("3") == schema_problems('{"properties": 3, "required": 4}') == []
    assert schema_problems("[" * 99_999) == ["it is nested too deeply"]


PIECES = ("a", "^", "$", "|", "(", ")")


def test_an_anchor_that_means_something_is_never_let_through() -> None:
    """Beside ``re``: all short expressions on all short texts; where an anchor is ignored unseen, nobody can tell."""
    texts, told = ["a" * count for count in range(5)], 0
    for pieces in (pieces for length in range(1, 5) for pieces in product(PIECES, repeat=length)):
        expression = "".join(pieces)
        try:
            whole, ignoring = re.compile(expression), re.compile(re.sub(r"[$^]", "", expression))
        except re.error:
            continue
        if expression_problems(expression):
            told += 1
        else:
            assert [bool(whole.fullmatch(text)) for text in texts] == [bool(ignoring.fullmatch(text)) for text in texts]
    assert told > 100


@pytest.mark.parametrize(
    "expression",
    [
        r"\Aa",
        r"a\Z",
        r"[\Q]",
        r"(\h)",
        "a{4294967297}",
        "(a|b){2,99999999999}",
        "x^a",
        "a$b",
        "[a-c]^",
        "a(^b)",
        "(a$)b",
    ],
)
def test_expressions_that_would_be_misread_are_told(expression: str) -> None:
    assert len(expression_problems(expression)) == 1


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "^ab$",
            "^(a|b$)",
            "(^a)b|^c",
            r"\^a\$b",
            "[$a^]",
            "[^$]",
            "a{2147483647}",
            "[a{99999999999}]",
            r"\{99999999999}",
        ),
        *(r"\d\D\w\W\s\S\n\r\t\f\v\0\x41é\cA[\]\\]", "(?:a|b)+?", "", "\\", "[", "a(", ")", "{9"),
    ],
)
def test_other_expressions_are_left_to_the_library(expression: str) -> None:
    assert expression_problems(expression) == []


def test_counts_that_overflow_are_told_in_grammars_but_not_in_what_they_quote() -> None:
    huge = "{" + "9" * 9999 + "}"
    for count in ("{4294967297}", "{ 3, 4294967297 }", "{4294967297,}", huge):
        assert len(grammar_problems(f'root ::= "a"{count} "b"')) == len(expression_problems(f"a{huge}")) == 1
    quoted = (
        'root ::= "{4294967297}\\"{4294967297}" [{4294967297}\\]{4294967297}] # {4294967297}\n | "a"{2,02147483647}'
    )
    assert grammar_problems(quoted) == []


def test_a_mapping_too_deep_to_be_written_is_of_a_wrong_type() -> None:
    deep: dict[str, object] = {}
    for _ in range(99_999):
        deep = {"items": deep}
    with pytest.raises(TypeError, match="not expressible as JSON"):
        StructuredOutputs(json_schema=deep)


@pytest.mark.parametrize(
    "pattern", ['a"', r"\"", '[a"]', r"\\", r"\n", "\n", r"[\t]", r"\x22", r"\u005c", r"\x1f", r"\cA"]
)
def test_what_json_must_escape_is_told_in_a_pattern_of_a_string(pattern: str) -> None:
    assert len(expression_problems(pattern, is_inside_json=True)) == 1
    assert expression_problems(pattern) == []


@pytest.mark.parametrize(
    "pattern", ['[^"]', r"[^\\]*", "[ -~]", ".", r"\S\W\D", r"[\s\S]", r"\/\.\-", "é", r"\x20", r"\^"]
)
def test_what_stays_inside_a_json_string_is_let_through(pattern: str) -> None:
    assert expression_problems(pattern, is_inside_json=True) == []
