"""The command `deepinfer`: thin commands over library functions, nothing computed here."""

from deepinfer.cli.app import main

__all__ = ["main"]
