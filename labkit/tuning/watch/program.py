"""Watch a training script from its start to its end, and report in every case."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from labkit.tuning.watch.ending import Replay, Steps, end_process
from labkit.tuning.watch.observing import Control, NothingSeen
from labkit.tuning.watch.script import CannotRun, Script
from labkit.tuning.watch.session import Watched
from labkit.tuning.watch.settings import Settings
from labkit.tuning.watch.terminal import ProgressLine, Terminal
from labkit.tuning.watch.termination import before_termination

if TYPE_CHECKING:
    from labkit.tuning.watch.report import WatchReport

_START = Path(__file__).with_name("start.py")
REPLAY_STEPS = 60


@dataclass(frozen=True)
class WatchOptions:
    """How to watch.

    steps: Report after so many batches of the training; 0: at its end.
    ends: End the script with the report, before anything is saved.
    replay: Repeat kept batches after `steps`, to measure the ceiling; the script ends with the report.
    json, html, trace: Files to write; empty: none.
    """

    steps: int = 0
    ends: bool = False
    replay: bool = False
    json: str = ""
    html: str = ""
    trace: str = ""


def run_watched(program: Sequence[str], options: WatchOptions) -> NoReturn:
    """Become a process that runs a program watched, started as this one was: `watch_script` is what it does.

    Args:
        program: A script and its arguments; or `-m`, a module and its arguments.
        options: Its files are those of this folder, wherever the script goes.
    """
    files = {name: os.path.abspath(path) for name in ("json", "html", "trace") if (path := getattr(options, name))}
    words = [str(_START), json.dumps({**asdict(options), **files}), *program]
    command = [sys.executable, *_interpreter_options(sys.orig_argv, len(sys.argv) - 1), *words]
    if os.name == "nt":  # there execv starts another process, and ends this one at once
        raise SystemExit(subprocess.call(command))
    os.execv(sys.executable, command)  # noqa: S606 - no shell


def _interpreter_options(command: Sequence[str], n_arguments: int) -> list[str]:
    """What stands between `python` and the program, such as `-u` or `-W error`; in front of the last `n_arguments`."""
    *words, name = command[1 : len(command) - n_arguments]
    if name.startswith("-"):  # -mlabkit
        words, name = [*words, re.split("[mc]", name, maxsplit=1)[0] + "m"], ""
    if words and re.fullmatch("-[bBdEhiIOPqsSuvx]*[mc]", words[-1]):
        words[-1] = words[-1][:-1]
    return [word for word in words if word != "-"]


def watch_script(program: Sequence[str], options: WatchOptions) -> None:
    """Run a script as `python` would, and report on stderr what it waited for: in every case, also after an error.

    What the script raises, and its exit status, are passed on; nothing that happens to the report changes them.

    Args:
        program: A script and its arguments; or `-m`, a module and its arguments.

    Raises:
        SystemExit: with status 2, if there is no such script.
    """
    terminal, watched = Terminal(), Watched()
    finish = _Finish(watched, options, terminal)
    watched.observer.control = _control(watched, options, finish, terminal)
    watched.observer.settings = Settings.of_environment()
    before_termination(finish)
    watched.start()
    try:
        script = Script(program)
    except CannotRun as error:
        terminal.tell(str(error))
        raise SystemExit(2) from None
    watched.command = script.shown
    try:
        script.run()
    finally:
        try:
            finish()
        except RuntimeError:  # torch's handler of SIGCHLD, which came before it could be held back
            if finish.is_done:
                raise
            finish()


class _Finish:
    """Reports once, in the process that watches: not in one that the script forks."""

    def __init__(self, watched: Watched, options: WatchOptions, terminal: Terminal):
        self._watched, self._options, self._terminal = watched, options, terminal
        self._pid, self._environment, self.is_done = os.getpid(), dict(os.environ), False

    def __call__(self) -> None:
        if self.is_done or os.getpid() != self._pid:
            return
        with _no_news_of_children(), _as_it_was():
            self.is_done = True
            try:
                self._say()
            except NothingSeen as error:
                self._terminal.tell(str(error))
            except BaseException as error:  # also Ctrl-C: the script has ended, or goes on, in its own way
                self._terminal.tell(f"there is no report: {type(error).__name__}: {error}")

    def and_end(self) -> None:
        self()
        end_process()

    def _say(self) -> None:
        self._watched.stop()
        from labkit.tuning.watch.ranks import combine_ranks

        report = combine_ranks(self._watched.report(), self._environment)
        if report is not None:
            with suppress(OSError):  # nobody reads it, but files may be asked for
                self._terminal.show(report)
            self._save(report)

    def _save(self, report: "WatchReport") -> None:
        from labkit.pipeline import save_trace

        writers: list[tuple[str, Callable[[str], Path]]] = [
            (self._options.json, report.save_json), (self._options.html, report.save_html),
            (self._options.trace, lambda path: save_trace(report.spans, path)),
        ]  # fmt: skip
        for path, write in writers:
            if path:
                try:
                    self._terminal.tell(f"wrote {write(path)}")
                except Exception as error:
                    why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    self._terminal.tell(f"cannot write {path}: {why}")


def _control(watched: Watched, options: WatchOptions, finish: _Finish, terminal: Terminal) -> Control:
    progress = ProgressLine(terminal)
    if options.replay:
        terminal.tell("--replay repeats batches: this run is no training, and saves nothing.")
        return Replay(watched, options.steps or REPLAY_STEPS, finish.and_end, progress)
    if options.steps:
        then = finish.and_end if options.ends else finish
        return Steps(options.steps, then, progress, at_end=options.ends)
    return progress


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo what importing the libraries of a report changes: the script may go on after it."""
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script may have made them errors
        undo.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        undo.callback(random.setstate, random.getstate())  # rich draws from it
        yield


@contextmanager
def _no_news_of_children() -> Iterator[None]:
    """Set a handler of SIGCHLD aside: torch's raises an error if a worker was killed, wherever this process is.

    A mask would not do, since the signal then goes to another thread, and Python's handlers run in the main one.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handle_children(lambda number, frame: None)
    try:
        yield
    finally:
        _handle_children(handler)


def _handle_children(handler: Callable[[int, FrameType | None], Any]) -> None:
    """Python runs a handler that is due before it sets the next one: what that says, the script's own error says."""
    while signal.getsignal(signal.SIGCHLD) is not handler:
        with suppress(RuntimeError):
            signal.signal(signal.SIGCHLD, handler)
