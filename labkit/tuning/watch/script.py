"""Run a Python script or module as `python` would, in this process."""

import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, TracebackType

from labkit.tuning.watch.secrets import shown_command


class CannotRun(ValueError):
    """There is no such script or module; the message says what was looked for."""


class Script:
    """A program of the command line.

    Args:
        name: Path of a script or of a folder with a `__main__.py`; or a module's name.
        arguments: For its `sys.argv`.
        is_module: As after `python -m`.

    Attributes:
        shown: Its command line, without secrets.

    Raises:
        CannotRun: it is not there, or it does not compile.
    """

    def __init__(self, name: str, arguments: Sequence[str] = (), *, is_module: bool = False):
        self._spec: ModuleSpec | None = None
        self._arguments, self.shown = list(arguments), shown_command(name, arguments, is_module=is_module)
        if is_module:
            self._first = os.getcwd()
            self._put_first()
            self._spec, self._code, self._path = _find_module(name)
        else:
            path = os.path.join(name, "__main__.py") if os.path.isdir(name) else name
            self._path, self._first = path, os.path.dirname(os.path.abspath(path))
            self._code = _compile_file(path)

    def run(self) -> None:
        """Run it as `__main__`, so that worker processes find it; what it raises is passed on."""
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=self._path, __builtins__=__builtins__, __spec__=self._spec)
        if self._spec is not None:
            main.__package__, main.__loader__ = self._spec.parent, self._spec.loader
        sys.modules["__main__"] = main
        sys.argv = [self._path, *self._arguments]
        self._put_first()
        try:
            exec(self._code, main.__dict__)  # noqa: S102 - the program that the user asked to run
        except BaseException:
            sys.excepthook = _without_our_frames(sys.excepthook, self._code)
            raise

    def _put_first(self) -> None:
        if sys.path[:1] != [self._first]:
            sys.path.insert(0, self._first)


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


def _compile_file(path: str) -> CodeType:
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        hint = "; for a module, write -m before its name" if not path.endswith(".py") else ""
        raise CannotRun(f"cannot read {path}: {error.strerror}{hint}") from None
    except (SyntaxError, ValueError) as error:
        raise CannotRun(f"{path} is no Python script: {error}") from None


def _without_our_frames(hook: Callable[..., object], code: CodeType) -> Callable[..., None]:
    """`sys.excepthook` that shows a traceback from the script's own first frame on, as `python` does."""

    def excepthook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        found = frames
        while found is not None and found.tb_frame.f_code is not code:
            found = found.tb_next
        hook(kind, error.with_traceback(found or frames), found or frames)

    return excepthook
