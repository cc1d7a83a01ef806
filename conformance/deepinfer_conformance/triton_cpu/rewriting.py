"""A kernel's Python source made runnable, without touching the module that it stands in.

Triton's own interpreter writes about fifty names into the kernel's module, so that a kernel which forgot an import
runs; and it leaves the language patched after a helper was called. Here the two names that the rewritten code needs
are closure variables.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from triton.runtime import interpreter

from deepinfer_conformance.triton_cpu.errors import InterpretationError

_GIVEN = ("interpreter_semantic", "_InterpreterComparison")


def rewrite(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """Returns the function with assignments turned into tensors, as the interpreter needs them."""
    code, nonlocals = _compiled(function)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)  # noqa: S102  # the kernel's own source, rewritten
    captured = inspect.getclosurevars(function).nonlocals
    values = [captured[name] for name in nonlocals]
    rewritten: Callable[..., Any] = namespace["_make"](semantic, interpreter._InterpreterComparison, *values)
    return rewritten


@cache
def _compiled(function: Callable[..., Any]) -> tuple[CodeType, tuple[str, ...]]:
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise InterpretationError(
            f"kernel {function.__qualname__!r} has no source file, and the interpreter rewrites source. "
            "Define it in a module"
        ) from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise InterpretationError(f"kernel {function.__qualname__!r} is no plain function definition")
    definition.decorator_list = []
    definition.returns = None
    for argument in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    definition = interpreter.ASTTransformer().visit(definition)
    nonlocals = tuple(sorted(inspect.getclosurevars(function).nonlocals))
    parameters = [ast.arg(arg=name) for name in (*_GIVEN, *nonlocals)]
    arguments = ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[])
    give_back = ast.Return(value=ast.Name(id=definition.name, ctx=ast.Load()))
    make = ast.FunctionDef(name="_make", args=arguments, body=[definition, give_back], decorator_list=[])
    module = ast.fix_missing_locations(ast.Module(body=[make], type_ignores=[]))
    ast.increment_lineno(module, first_line - 1)
    filename = inspect.getsourcefile(function) or "<kernel>"
    return compile(module, filename, "exec", dont_inherit=True), nonlocals


def is_constexpr(annotation: object) -> bool:
    """Whether a parameter's annotation says ``tl.constexpr``, as an object or as text."""
    if isinstance(annotation, str):
        return "constexpr" in annotation
    return getattr(annotation, "__name__", "") == "constexpr"
