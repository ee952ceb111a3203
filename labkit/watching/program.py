"""`lk.watch` and `labkit watch`: observe a block or a script, and tell in every case what it waited for."""

import atexit
import json
import os
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from labkit.errors import ArgumentError, CannotRun, NothingSeen
from labkit.measure.usage import descendants
from labkit.util.process import note_unknown_class
from labkit.watching.advice import CAUSES
from labkit.watching.lines import LineSampler
from labkit.watching.script import ProgressLine, Script, Terminal, before_exit, before_termination
from labkit.watching.seen import REPLAY, Control, SeenLoader
from labkit.watching.watched import Children, Watched

if TYPE_CHECKING:  # the libraries of a report are imported when there is one to make
    from labkit.watching.report import WatchReport


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


KEPT = 4  # batches to replay
_LEAST = 8  # batches in each part
UNSETTLED = 8  # batches before the figures begin
_LEAST_EPOCH = 48  # batches: of them 20 are observed and settled, and 20 replayed
_MOST_REST_S = 30.0
_PATIENCE = 10  # times the batches to see: a loop without gradients that goes on for so long is no validation


class Steps(Control):
    """Counts batches of the training, and acts when there are enough, or when their epoch ends before that.

    A training need not use torch's optimizers, nor step in each epoch: as long as none of them has stepped between two
    batches of any loader, a loop with gradients is taken for one, and any loop that goes on for long.

    Args:
        watched: What is observed.
        n_steps: Batches to see, besides the first ones.
        then: Called once, after the last of them.
        at_end: Whether the end of an epoch of the training also calls it, and what would save a file.
        progress: What else is told of each batch.
    """

    def __init__(
        self, watched: "Watched", n_steps: int, then: Callable[[], None], progress: Control, *, at_end: bool = True
    ):
        self._watched, self._n_steps, self._then = watched, n_steps, then
        self._progress, self._at_end, self._is_over = progress, at_end, False

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        if self._is_training(seen) and seen.n_batches >= self._n_steps + UNSETTLED:
            self._end_without_steps(seen)
        return give

    def saving(self, loaders: list[SeenLoader]) -> None:
        n_batches = sum(loader.n_batches for loader in loaders) or self._watched.record.loop.n_steps
        if self._at_end and n_batches:
            self._note(f"The script ends where it would save by torch.save, after {n_batches} batches of its loaders.")
            self._then()

    def looped(self, loop: Any) -> None:
        is_enough = loop.n_steps >= self._n_steps + UNSETTLED and not self._is_over
        if is_enough and not any(loader.trains for loader in self._watched.record.loaders):
            self._is_over = True
            self._end_loop(loop.name)

    def _end_loop(self, name: str) -> None:
        self._then()

    def _is_training(self, seen: SeenLoader) -> bool:
        if any(loader.trains for loader in self._watched.record.loaders):
            return seen.trains
        return seen.has_gradients or seen.n_batches >= _PATIENCE * (self._n_steps + UNSETTLED)

    def _end_without_steps(self, seen: SeenLoader) -> None:
        """Act, and say so if nothing but the number of batches tells that they were a training's."""
        if not seen.trains and not self._is_over:
            self._watched.record.main = seen
            self._note(
                f"The batches of {seen.kind} {seen.number} were taken for the training's, although neither "
                f"backward() nor an optimizer of torch ran between {seen.n_batches} of them."
            )
        self._is_over = True
        self._then()

    def _note(self, said: str) -> None:
        self._watched.record.failed.append(said)

    def received(self, seen: SeenLoader, data: Any) -> None:
        self._progress.received(seen, data)

    def ended(self, seen: SeenLoader) -> None:
        if self._at_end and self._is_training(seen):
            self._end_without_steps(seen)


class Replay(Steps):
    """After the observed steps, kept batches again in the script's own loop: the step alone; then the loader alone.

    An epoch must hold all of it, so that the loop does not end, nor a schedule of the learning rate. `then` must end
    the script.
    """

    def __init__(self, watched: "Watched", n_steps: int, then: Callable[[], None], progress: Control):
        super().__init__(watched, n_steps, then, progress)
        self._n_replayed = 0
        self._of: SeenLoader | None = None
        self.kept = list[Any]()

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        is_training = self.phase == "training" and self._is_training(seen)
        if is_training and seen.n_batches >= self._n_observed(seen) + UNSETTLED:
            self.phase, self._of = "keep", seen
        if seen is not self._of:
            return give
        if self.phase == "keep" and len(self.kept) == KEPT:
            self.phase = REPLAY
            _rest(seen)
        if self.phase == REPLAY and self._n_replayed == self._n_observed(seen) + 2:
            self._load_alone(seen, give)
            self._end_without_steps(seen)
        return self._kept_batch if self.phase == REPLAY else give

    def received(self, seen: SeenLoader, data: Any) -> None:
        super().received(seen, data)
        if self.phase == "keep" and seen is self._of:
            self.kept.append(_copied(data))

    def _end_loop(self, name: str) -> None:
        self._note(f"--replay repeats batches of loaders that are known, and nothing is known of that of {name}.")
        super()._end_loop(name)

    def ended(self, seen: SeenLoader) -> None:
        """It ends with the epoch, since a script may save after it."""
        if self._is_training(seen) and self.phase == "training":
            self._note(
                f"--replay ends with the first epoch, whose {len(seen.epochs[-1].batches)} batches are too few for it: "
                f"{_LEAST_EPOCH} are enough, as by a smaller batch size."
            )
        super().ended(seen)

    def _kept_batch(self) -> Any:
        self._n_replayed += 1
        return _copied(self.kept[self._n_replayed % KEPT])

    def _load_alone(self, seen: SeenLoader, give: Callable[[], Any]) -> None:
        """Seconds per batch, without those that it had ready; None at the end of the epoch."""
        began_s, times_s = time.perf_counter(), list[float]()
        with suppress(StopIteration):
            for _ in range(self._n_observed(seen)):
                give()
                times_s.append(time.perf_counter())
        later = times_s[len(times_s) // 2 :]
        if len(later) > 1:
            self._watched.loader_s = (later[-1] - later[0]) / (len(later) - 1)
        elif times_s:
            self._watched.loader_s = (times_s[-1] - began_s) / len(times_s)

    def _n_observed(self, seen: SeenLoader) -> int:
        """Steps to observe, and again to replay: fewer if the epoch is short."""
        if seen.traits.n_batches is None:
            return self._n_steps
        return max(_LEAST, min(self._n_steps, (seen.traits.n_batches - UNSETTLED - KEPT - 4) // 2))


def _copied(batch: Any) -> Any:
    """The batch in new containers with tensors of its own: a step may take items out of it, and write into them."""
    from labkit.util.tensor_trees import map_tensors

    return map_tensors(batch, lambda tensor: tensor.clone())


def _rest(seen: SeenLoader) -> None:
    """Let workers fill their queue: working ahead would slow down what is timed."""
    batches = seen.epochs[-1].batches
    a_batch_s = (batches[-1].received_s - batches[0].received_s) / max(1, len(batches) - 1)
    time.sleep(min(_MOST_REST_S, 1.3 * n_ahead(seen) * a_batch_s))


def n_ahead(seen: SeenLoader) -> int:
    """Batches that workers have ready at most; one of a loader that does not say."""
    traits = seen.traits
    return 1 if traits.num_workers is None else traits.num_workers * (traits.prefetch_factor or 2)


def end_process(status: int = 0) -> None:
    """End this process and the workers that it started at once: nothing that the script does at its end is done."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, a pipe that nobody reads, or what a script put there
            stream.flush()
    for child in descendants(os.getpid()):
        with suppress(OSError):  # it has ended
            os.kill(child, signal.SIGKILL)
    os._exit(status)


_START = Path(__file__).with_name("start.py")
REPLAY_STEPS = 60


@dataclass(frozen=True)
class WatchOptions:
    """How to watch.

    steps: Report after this many batches of the training; 0: at its end.
    ends: End the script with the report, before anything is saved.
    replay: Repeat kept batches after `steps`, to measure the ceiling; the script ends with the report.
    json, html: Files to write; empty: none.
    stall: Seconds without a batch after which to say what the training hangs in; 0: never.
    budget: Shares that may not be exceeded, as `parse_budget` gives them: the status is then `OVER_BUDGET`.
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


def parse_budget(text: str) -> dict[str, float]:
    """`waiting=5%,copy=0.01` as shares, 0 to 1.

    Raises:
        ArgumentError: no share of this name, or no percentage.
    """
    names, found = ("waiting", *CAUSES), dict[str, float]()
    for part in filter(None, text.split(",")):
        name, _, amount = part.strip().partition("=")
        try:
            share = float(amount.removesuffix("%")) / (100 if amount.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if name not in names or not 0 <= share < 1:
            raise ArgumentError(f"a budget is like waiting=5%, with one of {', '.join(names)}; got {part.strip()!r}")
        found[name] = share
    return found


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
    children = Children(watched)
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
        self.pid, self._environment, self.is_done = os.getpid(), dict(os.environ), False
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

        report = combine_ranks(seen, self._environment)
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
        for path, write in ((self._options.json, report.save_json), (self._options.html, report.save_html)):
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
        return Steps(watched, options.steps, then, progress, at_end=options.ends)
    return progress


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
