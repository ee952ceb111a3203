"""Commands and options that are gone: whoever asks for one is told in one line what to use instead.

A row is kept for one version.
"""

from typing import Any

import typer
from typer.core import TyperGroup

# A command, or a command and its option -> what to use instead.
GONE = {
    "plan": "notebook 15 does its arithmetic by hand, and `lk.plan` does it in Python",
    "reference": "on a machine with a CUDA device, the notebooks run on it: `python -m labkit tour --store`",
    "watch --trace": "export a trace for Perfetto by torch.profiler: prof.export_chrome_trace(path)",
}


def refuse_gone(command: str, option: str = "") -> None:
    """Print what to use instead of a command or option that is gone, and exit with code 2; else do nothing."""
    name = f"{command} {option}".strip()
    if successor := GONE.get(name):
        typer.echo(f"labkit: `{name}` is gone: {successor}", err=True)
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
