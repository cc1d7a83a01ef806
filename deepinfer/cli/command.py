"""Commands that report everything that is wrong with their arguments at once, instead of the first thing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand
from typer.exceptions import TyperException

from deepinfer.errors import ArgumentError


@dataclass
class _Scan:
    """Arguments as typed, parted into those that the parser can read and the problems with the others."""

    readable: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Command(TyperCommand):
    """A command whose unknown, malformed, missing and superfluous arguments end in one ArgumentError."""

    # `ctx` is typer's context; its class is private, and narrower or wider annotations would not match the base.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args`` into ``ctx.params``; raise ArgumentError with every problem."""
        if ctx.resilient_parsing:  # completion asks about unfinished lines
            return super().parse_args(ctx, args)
        parameters = self.get_params(ctx)
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in parameters
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        scan = _scan(args, takes_value)
        problems = scan.problems
        values, rest, _ = self.make_parser(ctx).parse_args(args=scan.readable)
        for parameter in sorted(parameters, key=lambda each: not each.is_eager):
            try:
                _, rest = parameter.handle_parse_result(ctx, values, rest)
            except TyperException as error:
                problems.append(error.format_message())
        problems += [f"unexpected argument {argument!r}" for argument in rest]
        if problems:
            raise ArgumentError(ctx.command_path, problems)
        ctx.args = rest
        return rest


def _scan(args: Sequence[str], takes_value: dict[str, bool]) -> _Scan:
    scan = _Scan()
    position = 0
    while position < len(args):
        argument = args[position]
        position += 1
        if argument == "--":
            scan.readable += args[position - 1 :]
            break
        if not argument.startswith("-") or argument == "-":
            scan.readable.append(argument)
            continue
        name, equals, _ = argument.partition("=")
        following = args[position] if position < len(args) else None
        if name not in takes_value:
            scan.problems.append(_unknown(name, list(takes_value)))
            # What follows an unknown option is most likely its value, and must not be reported a second time.
            position += not equals and following is not None and not following.startswith("-")
        elif not takes_value[name]:
            if equals:
                scan.problems.append(f"option {name} takes no value, and {argument!r} gives it one")
            else:
                scan.readable.append(argument)
        elif equals:
            scan.readable.append(argument)
        elif following is None:
            scan.problems.append(f"option {name} needs a value")
        else:
            scan.readable += [argument, following]
            position += 1
    return scan


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    if close:
        return f"unknown option {name!r}; did you mean {' or '.join(close)}?"
    return f"unknown option {name!r}; a value that begins with '-' goes after '--'"
