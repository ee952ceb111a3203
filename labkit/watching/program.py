"""`lk.watch` and `labkit watch`: observe a block or a script, and tell in every case what it waited for.

In comes a script, with `WatchOptions`, or a block; `hooks` note what it does in a `Record`. Out goes a `WatchReport`:
on stderr, in files, or from `Watched.report()`. Processes that the script starts by `multiprocessing` hand theirs over:
a forked one has the observation of its parent, which begins again; any other finds in its process object what begins
one, which is unpickled before the process runs anything of the script but its imports.
"""

import atexit
import functools
import json
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic  # goes on where the clock of a simulated device stands still
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from labkit.errors import CannotRun, NothingSeen
from labkit.measure.usage import core_time, descendants, tree_cpu_s
from labkit.util.process import note_unknown_class
from labkit.util.ranks import find_ranks
from labkit.watching.accounts import EpochFigures, describe_nothing, find_accounts
from labkit.watching.hooks import Change, Hooks
from labkit.watching.lines import LineSampler
from labkit.watching.loaders import Control
from labkit.watching.record import Record
from labkit.watching.replay import REPLAY_STEPS, Replay, Steps
from labkit.watching.script import Script, Terminal, before_exit, before_termination, watched_rank

if TYPE_CHECKING:  # the libraries of a report are imported when there is one to make
    from labkit.watching.report import WatchReport


class Watched:
    """What `watch` observes; `report()` tells what it saw so far, and `epochs` the figures of each epoch."""

    def __init__(self) -> None:
        self.record, self.command = Record(), ""
        self.hooks = Hooks(self.record)
        self._began = core_time(), tree_cpu_s(), monotonic(), time.perf_counter()
        self._report: WatchReport | None = None
        self._figures = EpochFigures(self.record)
        self._epochs: list[dict[str, float]] | None = None  # once the observation has ended

    def start(self, more: Mapping[str, Change] = MappingProxyType({})) -> None:
        self.hooks.start(more)

    def begin_again(self) -> None:
        """Forget what was seen: this process was forked, and that was its parent's."""
        self.record.forget()
        self._figures, self._epochs = EpochFigures(self.record), None
        self._report, self._began = None, (core_time(), tree_cpu_s(), monotonic(), time.perf_counter())

    def stop(self) -> None:
        """End the observation; its report stays."""
        try:
            self._report = self.report()
        except NothingSeen:
            self._report = None
        finally:
            with suppress(Exception):  # what cannot be told must not end the script
                self._epochs = self.epochs
            self.hooks.stop()
            self.record.stop()

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The figures of each epoch of the training that has ended so far, as flat dicts for a logger.

        Each has `epoch` (from 0) and `n_batches`; the shares of the time as the report has them, in sum 1: `compute`,
        `fetch`, `prepare`, `copy`, `hand-over` and `start`; `ready`, the share of its batches that were ready when
        they were asked for; `step_p50_ms`, `step_p95_ms` and `step_p99_ms`; and the seconds of pauses until the next
        epoch, which are in none of the other figures: `validation_s`, of loops over other loaders, and
        `checkpoint_s`, of `torch.save`. What is not known is NaN. The first batches of an epoch count by `start` only,
        those of the very first one if every epoch starts its workers. An epoch that its loop leaves early has ended
        when the next one begins.

        >>> for epoch in range(90):  # doctest: +SKIP
        ...     train(loader)
        ...     wandb.log(watched.epochs[-1])
        """
        if self._epochs is not None:
            return self._epochs
        with self.record.with_loop():
            return self._figures.read()

    def report(self) -> "WatchReport":
        """What the training waited for.

        Raises:
            NothingSeen: a ValueError: fewer than two batches were asked for.
        """
        if self._report is not None:
            return self._report
        epochs = self.epochs
        with self.record.with_loop():
            return self._report_of(epochs)

    def _report_of(self, epochs: list[dict[str, float]]) -> "WatchReport":
        cores, own_s, real_s, began_s = self._began
        busy_s, own_s = (core_time() - cores).busy_s, tree_cpu_s() - own_s
        core_s = (monotonic() - real_s) * (os.cpu_count() or 1)
        accounts = find_accounts(self.record)
        if accounts is None or not accounts.of("training"):
            raise NothingSeen(describe_nothing(self.record))
        from labkit.watching.findings import make_report

        self.record.device.read()
        return make_report(
            self.record, accounts, cpu_share=min(1.0, busy_s / core_s) if busy_s else None, epochs=epochs,
            others_share=max(0.0, busy_s - own_s) / core_s, loader_s=self.record.loader_s, command=self.command,
            observed_s=(began_s, time.perf_counter()),
        )  # fmt: skip


@contextmanager
def watch(*, lines: bool = True) -> Iterator[Watched]:
    """Observe what the training in this block waits for; nothing in it is changed.

    Every `torch.utils.data.DataLoader`, and whatever wraps one, and every `BatchLoader` is noted: when a batch was
    asked for and when it was there, how many were ready, and in the workers how long storage, `__getitem__` and the
    collate function took. On CUDA, events tell for how long the device had nothing to do.

    Args:
        lines: Whether to sample which lines the time goes into, and loops over what is not known with them.

    Yields:
        A `Watched`: its `report()` has the shares, the ceiling and what to change, in the block and after it, and its
        `epochs` the figures of each epoch so far, for a logger.

    >>> with lk.watch() as watched:  # doctest: +SKIP
    ...     for epoch in range(90):
    ...         train(loader)
    ...         wandb.log(watched.epochs[-1])
    >>> print(watched.report())  # doctest: +SKIP

    Taught in: notebooks/12_find_the_stall.ipynb
    """
    before = LineSampler.is_allowed
    LineSampler.is_allowed = before and lines
    watched = Watched()
    watched.start()
    try:
        yield watched
    except Exception as error:
        note_unknown_class(error)
        raise
    finally:
        LineSampler.is_allowed = before
        watched.stop()


_WORKERS = ("torch.utils.data.", "torchdata.", "multiprocessing.")  # modules whose processes train nothing


class Children:
    """Lets the processes that this one starts hand over their reports.

    Args:
        watched: What is observed in this process.
        folder: Where reports go. Default: one that is made when the first process starts.
        options: Of `labkit watch`, as JSON, for ranks that the script starts by its own command.
    """

    def __init__(self, watched: Watched, folder: str | None = None, options: str = ""):
        self._watched, self._folder, self._options = watched, folder, options
        self.environment = dict(os.environ)  # whose variables tell the rank, whatever the script makes of them

    def start(self) -> None:
        """Observe the processes that are started from now on."""
        change = self._watched.hooks.change
        self._watched.start({
            "multiprocessing.process": lambda process: change(process.BaseProcess, "start", self._starting),
            "subprocess": lambda module: change(module.Popen, "__init__", self._starting_rank),
        })  # fmt: skip
        os.register_at_fork(after_in_child=self._watched.begin_again)

    def hand_over(self) -> None:
        """Leave the report of this process, if it has one, where its parent looks."""
        if self._folder:
            with suppress(Exception):  # the process ends in its own way
                report = self._watched.report()
                import multiprocessing  # which the script started this process by

                name = multiprocessing.current_process().name
                path = Path(self._folder, f"{os.getpid()}.report")
                path.with_suffix(".part").write_bytes(pickle.dumps((name, report)))
                path.with_suffix(".part").rename(path)

    def stop(self) -> "WatchReport":
        """End the observation.

        Returns:
            The report of this process, or if it loaded nothing itself, of those that it started.

        Raises:
            NothingSeen: none of them has one.
        """
        paths = sorted(Path(self._folder or os.devnull).glob("*.report"))
        children = [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301 - from a folder of our own
        self._watched.stop()
        try:
            own = self._watched.report()
        except NothingSeen:
            if not children:
                raise
            from labkit.watching.ranks import combine

            note = "These are the figures of {}, which the script started"
            many = f"; of its {len(children)} processes this one waits longest for data."
            note += many if len(children) > 1 else "."
            return combine("process", children, note, self._watched.command)
        note = f"{len(children)} processes that the script started loaded data, too: they are not in these figures."
        return replace(own, notes=[*own.notes, note]) if children else own

    def _starting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", None) or ""
            self._folder = self._folder or record.folder()
            if self._folder and not module.startswith(_WORKERS):
                stall_s = record.stalls.stall_s if record.stalls else 0.0
                process._labkit_begins = _Begins(self._folder, stall_s, LineSampler.is_allowed)
            try:
                original(process)
            finally:
                vars(process).pop("_labkit_begins", None)

        record = self._watched.record
        return start

    def _starting_rank(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def start(process: Any, args: Any, *more: Any, **named: Any) -> None:
            given = watched_rank(args, named.get("env"), self._options) if self._options else args
            if given is not args:  # this process is the first rank
                self.environment = {**named["env"], "LOCAL_RANK": "0"}
            original(process, given, *more, **named)

        return start


class _Begins:
    """Begins an observation where it is unpickled."""

    def __init__(self, *own: Any):
        self._own = own

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, self._own


def _begin(folder: str, stall_s: float, takes_lines: bool) -> None:
    with suppress(Exception):  # the process must start
        LineSampler.is_allowed = LineSampler.is_allowed and takes_lines
        watched = Watched()
        watched.record.watch_stalls(stall_s, Terminal())
        children = Children(watched, folder)
        children.start()
        end = functools.cache(children.hand_over)
        before_exit(end)
        atexit.register(end)


_START = Path(__file__).with_name("start.py")


@dataclass(frozen=True)
class WatchOptions:
    """How to watch.

    steps: Report after this many batches of the training; 0: at its end.
    ends: End the script with the report, before anything is saved.
    replay: Repeat kept batches after `steps`, to measure the ceiling; the script ends with the report.
    json, html: Files to write; empty: none.
    stall: Seconds without a batch after which to say what the training hangs in; 0: never.
    budget: Shares that may not be exceeded, as `diff.parse_budget` gives them: the status is then `OVER_BUDGET`.
    lines: Whether to sample which lines the time goes into.
    verbose: Whether to print all that the report says, below its summary.
    """

    steps: int = 0
    ends: bool = False
    replay: bool = False
    json: str = ""
    html: str = ""
    stall: float = 60.0
    budget: Mapping[str, float] = field(default_factory=dict)
    lines: bool = True
    verbose: bool = False


OVER_BUDGET = 3  # exit status of a script that ended well and waited for more than it may, or that cannot be judged


def run_watched(program: Sequence[str], options: WatchOptions) -> NoReturn:
    """Become a process that runs a program watched, started as this one was: `watch_script` is what it does.

    Args:
        program: A script and its arguments; or `-m`, a module and its arguments.
        options: Its files are those of this folder, wherever the script goes.
    """
    named = {name: path for name in ("json", "html") if (path := getattr(options, name))}
    files = {name: os.path.abspath(os.path.expanduser(path)) for name, path in named.items()}
    words = [str(_START), json.dumps({**asdict(options), **files}), *program]
    command = [sys.executable, *_interpreter_options(sys.orig_argv, len(sys.argv) - 1), *words]
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
    LineSampler.is_allowed = LineSampler.is_allowed and options.lines
    terminal, watched = Terminal(), Watched()
    watched.record.watch_stalls(options.stall, terminal)
    children = Children(watched, options=json.dumps(asdict(options)))
    finish = _Finish(watched, children, options, terminal)
    watched.record.control = _control(watched, options, finish, terminal)
    before_termination(finish)
    before_exit(finish, lambda: finish.status if os.getpid() == finish.pid else 0)
    children.start()
    try:
        script = Script(program)
    except CannotRun as error:
        terminal.tell(str(error))
        raise SystemExit(2) from None
    watched.command = script.shown
    try:
        script.run()
    except SystemExit as end:
        finish.is_refused = end.code == 2  # as argparse ends it
        if end.code or not options.budget:
            raise
    finally:
        try:
            finish.at_end()
        except RuntimeError:  # torch's handler of SIGCHLD, which came before it could be held back
            if finish.is_done:
                raise
            finish()
    if finish.status:
        raise SystemExit(finish.status)


class _Finish:
    """Reports once, in the process that watches; in one that the script forks, hands the report over."""

    def __init__(self, watched: Watched, children: Children, options: WatchOptions, terminal: Terminal):
        self._watched, self._children, self._options, self._terminal = watched, children, options, terminal
        self.pid, self.is_done = os.getpid(), False
        self.status = 0  # of a script that ended well
        self.is_refused = False  # the script has refused its arguments

    def __call__(self) -> None:
        if self.is_done:
            return
        if os.getpid() != self.pid:
            self.is_done = True
            self._children.hand_over()
            return
        with _no_news_of_children(), _as_it_was():
            self.is_done = True
            try:
                self.status = OVER_BUDGET if self._options.budget else 0
                self._say()
            except NothingSeen as error:
                if not self.is_refused or self._watched.record.loaders:
                    self._terminal.tell(str(error))
            except BaseException as error:  # also Ctrl-C: the script has ended, or goes on, in its own way
                self._terminal.tell(f"there is no report: {type(error).__name__}: {error}")

    def at_end(self) -> None:
        """Report now, or where the script's threads still run, when Python has waited for them."""
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        if self._options.budget and os.getpid() == self.pid:  # nothing after Python's end can set the status
            if pools := sys.modules.get("concurrent.futures.thread"):
                pools._python_exit()  # as Python does first: threads of a pool wait for work until then
            for thread in others:
                if not thread.daemon:
                    thread.join()
            self()
        elif all(thread.daemon for thread in others) or os.getpid() != self.pid:
            self()
        else:
            atexit.register(self)

    def and_end(self) -> None:
        self()
        end_process(self.status)

    def _say(self) -> None:
        seen = self._children.stop()
        from labkit.watching.ranks import combine_ranks

        report = combine_ranks(seen, self._children.environment)
        if report is not None:
            with suppress(OSError):  # nobody reads it, but files may be asked for
                self._terminal.show(report, is_verbose=self._options.verbose)
            self._save(report)
        if self._options.budget:
            from labkit.watching.diff import judge_budget

            said = judge_budget(report.to_dict(), self._options.budget) if report is not None else []
            for line in said:
                self._terminal.tell(line)
            self.status = OVER_BUDGET if said else 0

    def _save(self, report: "WatchReport") -> None:
        rank = find_ranks(self._children.environment).rank
        end = f"-rank{rank}" if rank else ""  # of another machine, which may share the folder
        for path, write in ((self._options.json, report.save_json), (self._options.html, report.save_html)):
            if path:
                try:
                    self._terminal.tell(f"wrote {write(Path(path).with_stem(f'{Path(path).stem}{end}'))}")
                except Exception as error:
                    why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    self._terminal.tell(f"cannot write {path}: {why}")


def _control(watched: Watched, options: WatchOptions, finish: _Finish, terminal: Terminal) -> Control:
    if options.replay:
        terminal.tell("--replay repeats batches: this run is no training, and saves nothing.")
        return Replay(watched.record, options.steps or REPLAY_STEPS, finish.and_end)
    if options.steps:
        then = finish.and_end if options.ends else finish
        return Steps(watched.record, options.steps, then, at_end=options.ends)
    return Control()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo what importing the libraries of a report changes: the script may go on after it."""
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script may have made them errors
        undo.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        undo.callback(random.setstate, random.getstate())
        yield


@contextmanager
def _no_news_of_children() -> Iterator[None]:
    """Set a handler of SIGCHLD aside: torch's raises an error if a worker was killed, wherever this process is.

    A mask would not do, since the signal then goes to another thread, and Python's handlers run in the main one.
    """
    handler = signal.getsignal(signal.SIGCHLD)
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


def end_process(status: int = 0) -> None:
    """End this process and the workers that it started at once: nothing that the script does at its end is done."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, a pipe that nobody reads, or what a script put there
            stream.flush()
    for child in descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            os.kill(child, signal.SIGKILL)
    os._exit(status)
