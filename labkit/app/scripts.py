"""What the commands of labkit and of data_scripts/ share: one-line errors and common options."""

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


@contextmanager
def one_line_errors(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Print an error of one of `kinds` as one line on stderr, after the command's `name`, and exit with code 2."""
    try:
        with end_unprinted(name):
            yield
    except kinds as error:
        typer.echo(f"{name}: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def end_unprinted(name: str) -> Iterator[None]:
    """Exit with code 1 where stdout takes no more: with a line on stderr, or without one where nobody reads it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_WRITING:
            raise
        try:
            print(flush=True)  # fails again, unless the error is of a file or a server
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python prints that at its end
            with suppress(OSError):
                if error.errno != errno.EPIPE:
                    print(f"{name}: nothing more can be printed: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None
        raise


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
