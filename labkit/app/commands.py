"""Command lines from functions: their parameters are arguments and options, read by argparse; and how they print."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import Parameter, getdoc, signature
from types import UnionType
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

from labkit.errors import ArgumentError


@dataclass(frozen=True)
class Argument:
    """A parameter whose place tells what it is."""

    help: str
    metavar: str = ""


@dataclass(frozen=True)
class Option:
    """A parameter with a flag.

    flag: Default: `--name`, and for what is true or false also `--no-name`.
    least: The smallest number that is accepted.
    check: Takes the text and returns the value, in place of the parameter's type.
    """

    help: str
    flag: str = ""
    metavar: str | None = None
    least: float | None = None
    check: Callable[[str], Any] | None = None


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and knows no shortened options."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def add(self, function: Callable[..., Any]) -> "Parser":
        """Add the parameters of a function, which the namespace has as `function`."""
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in signature(function).parameters.items():
            hint = hints[name]
            kind, about = get_args(hint) if get_origin(hint) is Annotated else (hint, Option(""))
            _add_argument(self, name, kind, parameter, about)
        self.set_defaults(function=function)
        return self

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _add_argument(parser: Parser, name: str, annotation: Any, parameter: Parameter, about: Argument | Option) -> None:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    kind = kinds[0] if get_origin(annotation) is UnionType else annotation
    is_list = get_origin(kind) is list
    read = get_args(kind)[0] if is_list else kind
    is_needed = parameter.default is Parameter.empty
    known: dict[str, Any] = {"help": about.help.replace("%", "%%")}
    if isinstance(about, Argument):
        counts = ("+" if is_needed else "*") if is_list else (None if is_needed else "?")
        default = None if is_needed else parameter.default
        parser.add_argument(
            name, type=read, nargs=counts, default=default, metavar=about.metavar or name.upper(), **known
        )
        return
    flag = about.flag or f"--{name.replace('_', '-')}"
    if read is bool:
        action: Any = "store_true" if about.flag else argparse.BooleanOptionalAction
    else:
        action = "append" if is_list else "store"
        known |= {"type": about.check or _reader(read, about.least), "metavar": about.metavar}
    default = [*parameter.default] if is_list else parameter.default
    parser.add_argument(flag, dest=name, action=action, default=default, **known)


def _reader(kind: Callable[[str], Any], least: float | None) -> Callable[[str], Any]:
    if least is None:
        return kind

    def read(text: str) -> Any:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        return value

    read.__name__ = getattr(kind, "__name__", "value")  # for "invalid int value"
    return read


def split_program(function: Callable[..., Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command's own options, and those from the first other word on: a program and its arguments.

    Raises:
        ArgumentError: an option that the function does not have.
    """
    own = Parser(add_help=False).add(function)
    options = {flag: action for action in own._actions for flag in action.option_strings}
    number = 0
    while number < len(words) and words[number].startswith("-") and words[number] not in ("-h", "--help"):
        flag, equals, _ = words[number].partition("=")
        if words[number] == "--":
            return [*words[:number]], [*words[number + 1 :]]
        if flag not in options:
            raise ArgumentError(f"no option {flag}")
        number += 1 if equals or options[flag].nargs == 0 else 2
    return [*words[:number]], [*words[number:]]


def call(parsed: argparse.Namespace) -> Any:
    """Call the function of a command with what was read for it."""
    given = vars(parsed)
    return parsed.function(**{name: given[name] for name in signature(parsed.function).parameters})


def summary(function: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return (getdoc(function) or "").partition("\n")[0]


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a line at once, whatever the locale; names of files in it may be invalid UTF-8."""
    stream = sys.stderr if to_stderr else sys.stdout
    stream.flush()
    stream.buffer.write(f"{text}\n".encode(errors="surrogateescape"))
    stream.buffer.flush()


_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE)


@contextmanager
def one_line_errors(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Print an error of one of `kinds` as one line on stderr, after the command's `name`, and exit with code 2."""
    try:
        with end_unprinted(name):
            yield
    except kinds as error:
        say(f"{name}: {error}", to_stderr=True)
        raise SystemExit(2) from error


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
