"""The command line as a whole: its commands, and how an error or an interrupt becomes an exit status.

Status 0: done. 1: understood, and it failed. 2: what was typed, or set in the environment, is wrong. 130: interrupted.
Nothing here or in a command's module imports torch before the command runs, so that help and mistakes are instant.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Final

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from deepinfer.cli import balance, bench, checkpoint, conformance, devices, env, generate, plan, simulate
from deepinfer.cli import eval as evaluation
from deepinfer.cli.command import Command
from deepinfer.cli.session import Session
from deepinfer.errors import ArgumentError, ConfigurationError, DeepInferError, TokenizerError, UnknownDriverError

DONE: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130

_HELP_NAMES: Final = {"help_option_names": ["-h", "--help"]}


def build() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        name="deepinfer",
        help="Inference for DeepSeek-V4.1-Flash on any accelerator that has a driver.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP_NAMES,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, function in (
        ("generate", generate.generate),
        ("devices", devices.devices),
        ("plan", plan.plan),
        ("env", env.env),
        ("eval", evaluation.evaluate),
    ):
        app.command(name, cls=Command)(function)
    group = typer.Typer(rich_markup_mode=None, context_settings=_HELP_NAMES)
    group.callback(invoke_without_command=True)(_group)
    group.command("inspect", cls=Command)(checkpoint.inspect)
    group.command("make", cls=Command)(checkpoint.make)
    app.add_typer(group, name="checkpoint", help="Look into a checkpoint, or make one with random weights.")
    measures = typer.Typer(rich_markup_mode=None, context_settings=_HELP_NAMES)
    measures.callback(invoke_without_command=True)(_group)
    for name, function in bench.COMMANDS:
        measures.command(name, cls=Command)(function)
    app.add_typer(measures, name="bench", help="Measure; every figure says where it was taken.")
    placing = typer.Typer(rich_markup_mode=None, context_settings=_HELP_NAMES)
    placing.callback(invoke_without_command=True)(_group)
    placing.command("plan", cls=Command)(balance.plan)
    app.add_typer(placing, name="balance", help="Place experts on ranks by their load.")
    simulations = typer.Typer(rich_markup_mode=None, context_settings=_HELP_NAMES)
    simulations.callback(invoke_without_command=True)(_group)
    simulations.command("cluster", cls=Command)(simulate.cluster)
    app.add_typer(simulations, name="simulate", help="Try out what this machine does not have.")
    suite = typer.Typer(rich_markup_mode=None, context_settings=_HELP_NAMES)
    suite.callback(invoke_without_command=True)(_group)
    suite.command("run", cls=Command)(conformance.run)
    suite.command("list", cls=Command)(conformance.list_cases)
    suite.command("replay", cls=Command)(conformance.replay)
    suite.command("verify", cls=Command)(conformance.verify)
    suite.command("compare", cls=Command)(conformance.compare)
    suite.command("new-driver", cls=Command)(conformance.new_driver)
    app.add_typer(suite, name="conformance", help="Does a driver keep what it claims? Prove it, or see where not.")
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (this process's when None) and return the exit status."""
    session = Session()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = get_command(build()).main(args=words, prog_name="deepinfer", standalone_mode=False, obj=session)
    except DeepInferError as error:
        _report(error, session)
        is_input = isinstance(error, ArgumentError | ConfigurationError | TokenizerError | UnknownDriverError)
        status = BAD_INPUT if is_input else FAILED
    except TyperException as error:
        print(f"error: {error.format_message()}\nTry 'deepinfer --help'.", file=sys.stderr)
        status = BAD_INPUT
    except BrokenPipeError:
        status = FAILED
    except OSError as error:
        _report(error, session)
        status = FAILED
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    finally:
        session.close()
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    _flush()
    return status if isinstance(status, int) else DONE


def _root(
    ctx: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and log everything.")] = False,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    session: Session = ctx.obj
    session.debug = debug
    if show_version:
        print(version("deepinfer-multibackend"))
        raise typer.Exit
    _group(ctx)


def _group(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def _report(error: Exception, session: Session) -> None:
    if session.shows_tracebacks():
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`deepinfer devices | head -1`); without this the interpreter complains at exit.
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except io.UnsupportedOperation:  # standard output is not a file, so nothing is flushed at exit
            return
