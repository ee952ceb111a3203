"""Run a Python script or module as `python` would, in this process."""

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, TracebackType

from labkit.tuning.watch.secrets import shown_command


class CannotRun(ValueError):
    """There is no such script or module; the message says what was looked for."""


class Script:
    """A program of the command line, found as `python` finds it.

    Args:
        program: The path of a script, or of a folder or zip with a `__main__.py`, and its arguments; or `-m`, a
            module's name and its arguments.

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
        elif found := _find_main(path):
            _put_first(path)
            self._spec, self._code, path = found
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


def _find_main(path: str) -> tuple[ModuleSpec, CodeType, str] | None:
    """The `__main__` of a folder or zip; None: the path is of a script."""
    spec = PathFinder.find_spec("__main__", [path])
    code = getattr(spec.loader, "get_code", lambda _: None)("__main__") if spec is not None else None
    return None if spec is None or code is None else (spec, code, spec.origin or path)


def _find_module(name: str) -> tuple[ModuleSpec, CodeType, str]:
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except (ImportError, ValueError) as error:
            raise CannotRun(
                f"there is no module {candidate} here ({os.getcwd()}), and none is installed: {error}"
            ) from None
        if spec is None:
            raise CannotRun(f"there is no module {candidate} here ({os.getcwd()}), and none is installed")
        if spec.submodule_search_locations is None:
            code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
            if code is None:
                raise CannotRun(f"{candidate} is no Python module that can be run")
            return spec, code, spec.origin or name
    raise CannotRun(f"{name} is a package without __main__: name the module in it that trains")


def _compile_file(name: str, path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        hint = "; for a module, write -m before its name" if not name.endswith(".py") else ""
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
