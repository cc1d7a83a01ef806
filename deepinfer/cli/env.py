"""`deepinfer env`: the environment variables, their values and what they do."""

from __future__ import annotations

from typing import Annotated

import typer

from deepinfer import settings
from deepinfer.cli import show
from deepinfer.errors import ArgumentError


def env(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write the page docs/environment.md.")] = False,
) -> None:
    """Show every environment variable.

    Its value, default and effect. Bad values and unknown variables are an error (status 2).
    """
    if as_json and as_markdown:
        raise ArgumentError("deepinfer env", ["--json and --markdown exclude each other; give one of them"])
    if as_markdown:
        print(settings.markdown(), end="")
        return
    values = settings.current()
    if as_json:
        print(
            show.pretty_json(
                [
                    {
                        "name": item.setting.name,
                        "value": item.value,
                        "type": item.setting.type,
                        "choices": list(item.setting.choices),
                        "default": item.setting.default,
                        "effect": item.setting.effect,
                    }
                    for item in values
                ]
            )
        )
    else:
        rows = [
            (
                item.setting.name,
                "(unset)" if item.value is None else repr(item.value),
                item.setting.default,
                item.setting.effect,
            )
            for item in values
        ]
        print(show.table(("name", "value", "default", "effect"), rows))
    settings.Settings.from_environment()
