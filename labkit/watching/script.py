"""Run a Python script or module as `python` would, in this process, and speak to its terminal.

In come the words of a command line; out goes what the script itself does, and beside it lines on the terminal.

SIGTERM, as from a scheduler or torchrun, ends a script at once: the report comes first, unless the script has a handler
itself. What `watch` says goes to the stderr it was started with, whatever the script makes of it, and a command line is
shown without the values of passwords and tokens.
"""

import builtins
import fcntl
import functools
import importlib.util
import io
import os
import pkgutil
import re
import shlex
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from labkit.errors import CannotRun
from labkit.util.ranks import number_in_environment
from labkit.util.redact import redact
from labkit.watching.advice import SHORT_NAMES
from labkit.watching.loaders import rounded

_SECRET = re.compile(
    r"token|passw|secret|credential|api[-_]?key|access[-_]?key|\bauth|(^|[-_])(key|pw|pwd)$", re.IGNORECASE
)


def shown_command(name: str, arguments: Sequence[str], *, is_module: bool = False) -> str:
    """`train.py --epochs 1`, with `...` for what an option named like a secret is given, and without home folders."""
    shown, hides = list[str](), False
    for argument in arguments:
        shown.append("..." if hides and not argument.startswith("-") else _shown(argument))
        hides = argument.startswith("-") and _names_a_secret(argument)
    words = [*(["-m"] if is_module else []), name, *shown]
    return " ".join(word if word == "..." else _without_home(shlex.quote(word)) for word in words)


def _shown(argument: str) -> str:
    option, equals, _ = argument.partition("=")
    return f"{option}=..." if equals and _names_a_secret(option) else redact(argument)


def _names_a_secret(option: str) -> bool:
    return re.fullmatch(r"[\w.-]+", option) is not None and _SECRET.search(option) is not None


def _without_home(word: str) -> str:
    return re.sub(r"^'?(/home/[^/\s]+|/Users/[^/\s]+|/root)(?=/|$)", "~", word)


class Script:
    """A program of the command line, found as `python` finds it.

    Args:
        program: The path of a script, or of a folder or zip with `__main__.py`, and its arguments; or `-m`, the name of
            a module, or of a package with `__main__.py`, and its arguments.

    Attributes:
        shown: Its command line, without secrets.

    Raises:
        CannotRun: it is not there, or it does not compile.
    """

    def __init__(self, program: Sequence[str]):
        self._spec: ModuleSpec | None = None
        is_module = program[0] == "-m"
        name, *arguments = program[1:] if is_module else program
        self.shown, path = shown_command(name, arguments, is_module=is_module), os.path.join(os.getcwd(), name)
        if is_module:
            sys.argv = ["-m", *arguments]  # what the packages around it see
            _put_first(os.getcwd())
            self._spec, self._code, path = _find_module(name)
        elif os.path.exists(path) and pkgutil.get_importer(path) is not None:
            sys.path.insert(0, path)  # also where `python -P` leaves out a script's folder
            self._spec, self._code, path = _find_main(name, path)
        else:
            self._code = _compile_file(name, path)
            _put_first(os.path.dirname(os.path.realpath(path)))
        sys.argv, self._path = [path if is_module else name, *arguments], path

    def run(self) -> None:
        """Run it as `__main__`, so that worker processes find it; what it raises is passed on."""
        main, spec = types.ModuleType("__main__"), self._spec
        main.__dict__.update(
            __builtins__=builtins, __annotations__={}, __spec__=spec, __file__=self._path,
            __loader__=spec.loader if spec else SourceFileLoader("__main__", self._path),
            __package__=spec.parent if spec else None, __cached__=spec.cached if spec else None,
        )  # fmt: skip
        sys.modules["__main__"] = main
        try:
            exec(self._code, main.__dict__)  # noqa: S102 - the program that the user asked to run
        except BaseException:
            sys.excepthook = _without_our_frames(sys.excepthook, self._code)
            raise


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _find_module(name: str) -> tuple[ModuleSpec, CodeType, str]:
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except (ImportError, ValueError) as error:
            raise CannotRun(
                f"there is no module {candidate} here ({os.getcwd()}), and none is installed: {error}"
            ) from None
        if spec is None and candidate != name:
            break
        if spec is None:
            raise CannotRun(f"there is no module {candidate} here ({os.getcwd()}), and none is installed")
        if spec.submodule_search_locations is None:
            code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
            if code is None:
                raise CannotRun(f"{candidate} is no Python module that can be run")
            return spec, code, spec.origin or name
    raise CannotRun(f"{name} is a package without __main__: name the module in it that trains")


def _find_main(name: str, path: str) -> tuple[ModuleSpec, CodeType, str]:
    """`__main__` of a folder or a zip."""
    spec = PathFinder.find_spec("__main__", [path])
    try:
        code = getattr(spec.loader, "get_code", lambda _: None)("__main__") if spec is not None else None
    except (SyntaxError, ValueError) as error:
        raise CannotRun(f"__main__ of {name} is no Python script: {error}") from None
    if spec is None or code is None:
        raise CannotRun(f"{name} holds no __main__.py, which python would run: name the script in it that trains")
    return spec, code, spec.origin or path


def _compile_file(name: str, path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        hint = "; for a module, write -m before its name" if not name.endswith(".py") else ""
        if re.fullmatch(r"python[\d.]*", name):
            hint = ": write the script alone, which runs under the Python that runs labkit"
        raise CannotRun(f"cannot read {name}: {error.strerror}{hint}") from None
    except (SyntaxError, ValueError) as error:
        raise CannotRun(f"{name} is no Python script: {error}") from None


def _without_our_frames(hook: Callable[..., object], code: CodeType) -> Callable[..., None]:
    """`sys.excepthook` that shows a traceback from the script's own first frame on, as `python` does."""

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        found = frames
        while found is not None and found.tb_frame.f_code is not code:
            found = found.tb_next
        hook(kind, error.with_traceback(found or frames), found or frames)

    return excepthook


def before_exit(act: Callable[[], None], status_of: Callable[[], int] = int) -> None:
    """Call `act` before `os._exit` ends the process; scripts call it to end while threads of theirs still run.

    Where they end it with status 0, it is that of `status_of`.
    """
    end = os._exit

    @functools.wraps(end)
    def _exit(status: int) -> None:
        act()
        end(status or status_of())

    os._exit = _exit  # type: ignore[assignment]  # it returns as little


def before_termination(report: Callable[[], object]) -> None:
    """Call `report` when SIGTERM would end this process, then let it end so.

    The script finds what it would find without this: `signal.getsignal` and `signal.signal` say that there is no
    handler, one that it sets takes this one's place, and `SIG_DFL` brings this one back. A process that it forks has
    none.
    """
    set_handler, get_handler = signal.signal, signal.getsignal
    if get_handler(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        report()
        set_handler(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def shown(handler: Any) -> Any:
        return signal.SIG_DFL if handler is terminate else handler

    @functools.wraps(set_handler)
    def set_shown(signalnum: int, handler: Any) -> Any:
        is_default = signalnum == signal.SIGTERM and not callable(handler) and handler == signal.SIG_DFL
        return shown(set_handler(signalnum, terminate if is_default else handler))

    @functools.wraps(get_handler)
    def get_shown(signalnum: int) -> Any:
        return shown(get_handler(signalnum))

    def end_in_child() -> None:
        if get_handler(signal.SIGTERM) is terminate:
            with suppress(ValueError):
                set_handler(signal.SIGTERM, signal.SIG_DFL)

    set_handler(signal.SIGTERM, terminate)
    signal.signal, signal.getsignal = set_shown, get_shown
    os.register_at_fork(after_in_child=end_in_child)


if TYPE_CHECKING:
    from labkit.watching.report import WatchReport

_BAR = 40
_ABOVE = (200, 3)  # lowest numbers to try for a descriptor: those from 3 on are the script's files


class Terminal:
    """The process's stderr as it was at the start: a script may close it, replace `sys.stderr`, or redirect it.

    It is silent where there was none, and once nobody reads it.
    """

    def __init__(self) -> None:
        self._own, self._file = _own_stderr(), _identity(2)

    @property
    def stream(self) -> TextIO:
        """Where to write; stderr itself where a script has closed all files that it did not open."""
        if isinstance(self._own, io.StringIO) or _identity(self._own.fileno()) == self._file:
            return self._own
        is_there = _identity(2) == self._file
        return _as_text(2, getattr(self._own, "encoding", "utf-8")) if is_there else io.StringIO()

    @property
    def descriptor(self) -> int | None:
        """That of `stream`; None where it is no file."""
        with suppress(OSError, ValueError):
            return self.stream.fileno()
        return None

    def tell(self, text: str) -> None:
        """Say one line."""
        with suppress(OSError, ValueError):
            self.stream.write(f"labkit watch: {text}\n")

    def show(self, report: "WatchReport", *, is_verbose: bool) -> None:
        """The summary; with `is_verbose` all that the report says, and its tables."""
        from labkit.watching.report import format_row  # by now it is there

        said = ["", repr(report)]
        if is_verbose:
            shares = ((SHORT_NAMES[name], share) for name, share in report.shares.items())
            said += ["", *(f"{name:<14} {share:6.1%}  {'#' * round(_BAR * share)}" for name, share in shares)]
            said += [*report.details, *_aligned(report.tables["loaders"])]
            said += _aligned(report.tables["ranks"]) if "ranks" in report.tables else []
        else:
            said.append(format_row("details", "--verbose, or in files: --html report.html, --json report.json"))
        self.stream.write("".join(f"{line}\n" for line in said))


def _own_stderr() -> TextIO:
    """stderr under a descriptor of its own, which processes that the script starts or forks do not keep open."""
    try:
        descriptor = _copied(2)
    except OSError:  # it is closed, and a file of the script may get its number
        return io.StringIO()
    os.register_at_fork(after_in_child=lambda: _close(descriptor))
    return _as_text(descriptor, getattr(sys.stderr, "encoding", None) or "utf-8")


def _as_text(descriptor: int, encoding: str) -> TextIO:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", write_through=True)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Which file a descriptor is of; None: it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _close(descriptor: int) -> None:
    with suppress(OSError):  # a daemon closes all that it has, and then forks
        os.close(descriptor)


def _copied(descriptor: int) -> int:
    for above in _ABOVE[:-1]:
        with suppress(ValueError, OSError):  # a process may be allowed fewer files
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE[-1])


def _aligned(table: list[dict[str, Any]]) -> list[str]:
    """The rows of a table, below its header."""
    rows = [[*table[0]], *([_cell(value) for value in row.values()] for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [name in ("loader", "role") for name in table[0]]
    return [
        "  ".join(f"{cell:{'<' if text else '>'}{width}}" for cell, width, text in zip(row, widths, texts, strict=True))
        for row in rows
    ]


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return rounded(value) if isinstance(value, float) else str(value)


def watched_rank(command: Any, environment: Mapping[str, str] | None, options: str) -> Any:
    """The command by which Lightning's launcher starts another rank of this script, so that it is watched, too.

    Args:
        command: Of a process that is to start: the interpreter, the script or `-m` and its module, and arguments.
        environment: That of the process.
        options: Of `labkit watch`, as its file `start.py` takes them.

    Returns:
        The command that watches it; any other command as it is.
    """
    is_rank = environment is not None and "RANK" not in environment and number_in_environment(
        "LOCAL_RANK", 0, environment
    ) > 0  # fmt: skip
    if not is_rank or not isinstance(command, list) or command[:1] != [sys.executable] or len(command) < 2:
        return command
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    own = ["-m", spec.name] if command[1] == "-m" and spec else [os.path.abspath(sys.argv[0])]
    is_own = command[1 : len(own) + 1] == own
    return [sys.executable, str(Path(__file__).with_name("start.py")), options, *command[1:]] if is_own else command
