"""Watch a training script from its start to its end, and report in every case."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from labkit.pipeline import save_trace
from labkit.tuning.watch.ending import Replay, Steps, end_process
from labkit.tuning.watch.observing import Control
from labkit.tuning.watch.ranks import combine_ranks
from labkit.tuning.watch.report import WatchReport
from labkit.tuning.watch.script import Script
from labkit.tuning.watch.session import NothingSeen, Watched
from labkit.tuning.watch.settings import Settings
from labkit.tuning.watch.terminal import ProgressLine, print_report

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


def watch_script(script: Script, options: WatchOptions) -> None:
    """Run a script as `python` would, and report on stderr what it waited for: in every case, also after an error.

    What the script raises, and its exit status, are passed on.
    """
    watched = Watched(script.shown)
    finish = _Finish(watched, options)
    watched.observer.control = _control(watched, options, finish)
    watched.observer.settings = Settings.of_environment()
    _report_before_termination(finish)
    watched.start()
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

    def __init__(self, watched: Watched, options: WatchOptions):
        self._watched, self._options, self._pid, self.is_done = watched, options, os.getpid(), False

    def __call__(self) -> None:
        if self.is_done or os.getpid() != self._pid:
            return
        with _no_news_of_children(), suppress(BrokenPipeError):
            self.is_done = True
            self._watched.stop()
            self._say()

    def and_end(self) -> None:
        self()
        end_process()

    def _say(self) -> None:
        try:
            report = combine_ranks(self._watched.report())
        except NothingSeen as error:
            print(f"labkit watch: {error}", file=sys.stderr, flush=True)
            return
        if report is not None:
            print_report(report)
            _save(report, self._options)


def _save(report: WatchReport, options: WatchOptions) -> None:
    writers: list[tuple[str, Callable[[str], Path]]] = [
        (options.json, report.save_json), (options.html, report.save_html),
        (options.trace, lambda path: save_trace(report.spans, path)),
    ]  # fmt: skip
    for path, write in writers:
        if path:
            try:
                print(f"labkit watch: wrote {write(path)}", file=sys.stderr)
            except OSError as error:  # the script's own end and exit status must not change
                print(f"labkit watch: cannot write {path}: {error.strerror}", file=sys.stderr)


def _control(watched: Watched, options: WatchOptions, finish: _Finish) -> Control:
    progress = ProgressLine()
    if options.replay:
        print("labkit watch: --replay repeats batches: this run is no training, and saves nothing.", file=sys.stderr)
        return Replay(watched, options.steps or REPLAY_STEPS, finish.and_end, progress)
    if options.steps:
        then = finish.and_end if options.ends else finish
        return Steps(options.steps, then, progress, at_end=options.ends)
    return progress


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


def _report_before_termination(finish: _Finish) -> None:
    """SIGTERM, as from a scheduler or torchrun, ends a script at once: report first, unless it has a handler itself."""

    def terminate(number: int, frame: FrameType | None) -> None:
        finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
