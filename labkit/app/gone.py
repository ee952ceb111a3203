"""Commands and options that are gone: whoever asks for one is told in one line what to use instead."""

from typing import Any

import typer
from typer.core import TyperGroup

from labkit.util.gone import told_if_gone


def refuse_gone(command: str, option: str = "") -> None:
    """Print what to use instead of a command or option that is gone, and exit with code 2; else do nothing."""
    if told := told_if_gone(f"labkit {command} {option}".strip()):
        typer.echo(f"labkit: {told}", err=True)
        raise typer.Exit(2)


class Commands(TyperGroup):
    """The commands of labkit, which know those that are gone."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_gone(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer has click's classes, or its own copies of them
            refuse_gone(ctx.invoked_subcommand or "", getattr(error, "option_name", ""))
            raise
