"""What the commands of labkit and of data_scripts/ share: one-line errors and common options."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.util.process import print_utf8

Source = Annotated[str, typer.Argument(help="A folder of images, a tar, or a URL of either.")]
Ignore = Annotated[list[str], typer.Option(help="Suffix of files to leave out, such as .gif; may be repeated.")]
# Paths are not checked by the parser (`readable=False`): it would print a box with the usage, not one line.
Root = Annotated[Path, typer.Argument(readable=False, help="Folder to fill; created if missing.")]
Seed = Annotated[int, typer.Option(help="Another seed gives another set.")]
Engine = Annotated[str, typer.Option(help="local (processes), threads or ray (several machines).")]
Address = Annotated[str | None, typer.Option(help="Address of the Ray cluster, for --engine ray: host:port or auto.")]
NumWorkers = Annotated[int | None, typer.Option(help="Default: the usable cores.", min=0)]


@contextmanager
def one_line_errors(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Print an error of one of `kinds` as one line on stderr, after the command's `name`, and exit with code 2."""
    try:
        yield
    except kinds as error:
        typer.echo(f"{name}: {error}", err=True)
        raise typer.Exit(2) from error


def command(main: Callable[..., str]) -> typer.Typer:
    """The command line of a script: prints the line that `main` returns, and reports errors as one line."""
    print_utf8()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    name = Path(inspect.getfile(main)).stem

    @app.command()
    @wraps(main)
    def run(**arguments: Any) -> None:
        with one_line_errors(name, ValueError, OSError, RuntimeError, ImportError):  # ItemErrors is a RuntimeError
            typer.echo(os.fsencode(main(**arguments)))  # bytes: file names may be invalid UTF-8

    return app
