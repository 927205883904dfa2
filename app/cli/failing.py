"""How a command ends that cannot do what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

A = TypeVar("A")


def or_fail(ask: Callable[[], A]) -> A:
    """What `ask` gives. A CliError ends the command."""
    from app.cli.client import CliError

    try:
        return ask()
    except CliError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
