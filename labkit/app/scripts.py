"""What the scripts of data_scripts/ share: common arguments and options, one line of output, and one-line errors."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from labkit.app.commands import Argument, Option, Parser, call, one_line_errors, say, summary
from labkit.util.process import print_utf8

Source = Annotated[str, Argument(help="A folder of images, a tar, or a URL of either.")]
Ignore = Annotated[list[str], Option(help="Suffix of files to leave out, such as .gif; may be repeated.")]
Root = Annotated[Path, Argument(help="Folder to fill; created if missing.")]
Seed = Annotated[int, Option(help="Another seed gives another set.")]
Engine = Annotated[str, Option(help="local (processes), threads or ray (several machines).")]
Address = Annotated[str | None, Option(help="Address of the Ray cluster, for --engine ray: host:port or auto.")]
NumWorkers = Annotated[int | None, Option(help="Default: the usable cores.", least=0)]


def command(main: Callable[..., str]) -> Callable[..., None]:
    """The command line of a script: prints the line that `main` returns, and reports errors as one line."""
    print_utf8()
    name = Path(inspect.getfile(main)).stem
    parser = Parser(prog=name, description=summary(main)).add(main)

    def run(words: Sequence[str] | None = None) -> None:
        parsed = parser.parse_intermixed_args(words)
        with one_line_errors(name, ValueError, OSError, RuntimeError, ImportError):  # ItemErrors is a RuntimeError
            say(call(parsed))

    run.parser = parser  # type: ignore[attr-defined]
    return run
