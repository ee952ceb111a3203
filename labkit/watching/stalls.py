"""What a training hangs in: when no batch comes, one report, made in its process while the script goes on.

In comes what the training does, a new `Doing` each time; out go lines on the terminal, and what is added to the report.

A thread looks a few times whether the training has got on. Python's own stacks come from `faulthandler`: those of other
processes by a signal that is nobody else's, which works also while C code holds Python's lock, and where C code holds
it in this process, so that no thread can look, by `faulthandler.dump_traceback_later`. The rest is what Linux says of
the processes in /proc. Nothing is attached to a process, and only the standard library is imported.
"""

import faulthandler
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

from labkit.measure.usage import descendants
from labkit.watching.lines import calls_of_thread, line_at, short_path
from labkit.watching.linux import (
    descriptor_of,
    file_limit,
    open_files,
    read_text,
    shared_memory,
    state_of,
    system_call,
)
from labkit.watching.loaders import names_of
from labkit.watching.resources import ALL_FILES, FULL_SHM, FULL_SHM_BYTES
from labkit.watching.worker import SIGNAL, Hand, answer_with_stacks, answers_in, hand_here


class Doing(NamedTuple):
    """What a training does, as far as its loaders know.

    what: `"starts"` an epoch, `"waits"` for a batch, or `"steps"` with one.
    seen: The loader, a `SeenLoader`.
    n_batches: That the epoch has given so far.
    worker: Which one makes the batch that is waited for; None if unknown, -1: the training process.
    iterator: torch's, where there is one.
    """

    what: str
    seen: Any
    n_batches: int
    worker: int | None
    iterator: ref[Any] | None

    @property
    def loader(self) -> str:
        return f"{self.seen.kind} {self.seen.number}"

    @property
    def folder(self) -> str:
        """Of what its workers note."""
        return self.seen.folder


_POLLS = 4  # looks without a change that make a stall
_MOST_REPORTS = 3
_DEPTH = 10  # calls of a stack that are shown


class StallWatch:
    """Reports when the training has not got on for a while.

    Args:
        stall_s: Seconds; 0: never.
        doing: Says what the training does; the same object as before, if it has not got on.
        tell: Says a text.
        descriptor: Where the stacks go while C code holds Python's lock; None: nowhere.

    Attributes:
        found: What each stall looked like, for the report at the end.
    """

    def __init__(
        self,
        stall_s: float,
        doing: Callable[[], Doing | None],
        tell: Callable[[str], object],
        descriptor: Callable[[], int | None] = lambda: None,
    ):
        self.stall_s, self._doing, self._tell, self._descriptor = stall_s, doing, tell, descriptor
        self.found: list[str] = []
        self._last: Doing | None = None
        self._n_same = 0
        self._ended, self._pid, self._is_theirs, self._is_armed = threading.Event(), 0, False, False
        self._lock, self._holds = threading.RLock(), False  # a handler of a signal may come in between
        self._later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

    def start(self, path: str | None) -> Callable[[], None]:
        """Begin to look, in a thread of this process; returns what ends it.

        Args:
            path: Where processes leave their stacks.
        """
        if not self.stall_s or self.runs:
            return lambda: None
        is_first, self._pid = not self._pid, os.getpid()
        self._ended = threading.Event()
        if path:
            with suppress(OSError):
                answer_with_stacks(path)
        if is_first:
            # A forked process has no thread of faulthandler's, and would wait for it at its end.
            os.register_at_fork(before=self._disarm_to_fork, after_in_parent=self._forked, after_in_child=self._forget)
            self.give_way()
        threading.Thread(target=self._look, name="labkit-stall", daemon=True).start()
        return self.stop

    def give_way(self) -> None:
        """From now on, faulthandler has one such clock, which is the script's once it sets it."""
        if faulthandler.dump_traceback_later is self._later:
            faulthandler.dump_traceback_later = self._given_away(self._later)

    @property
    def runs(self) -> bool:
        """Whether a thread of this process looks; one that it forks has none."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        with self._lock:
            self._disarm()
        faulthandler.dump_traceback_later = self._later
        if SIGNAL:
            faulthandler.unregister(SIGNAL)

    def look(self) -> None:
        """Report if the training has not got on since so many looks."""
        doing = self._doing()
        self._n_same = self._n_same + 1 if doing is not None and doing is self._last else 0
        self._last = doing
        if doing is not None and self._n_same == _POLLS and len(self.found) < _MOST_REPORTS:
            words, lines = describe_stall(doing)
            is_long = doing.what == "steps"
            self.found.append(f"A step took over {self.stall_s:.0f} s: {words}" if is_long else f"It hung: {words}")
            self._tell("\n".join([f"{_headline(doing, self.stall_s)}; the script goes on. {words}", *lines]))

    def _look(self) -> None:
        period_s = self.stall_s / _POLLS
        while True:
            self._arm(self.stall_s + period_s)
            before_s = time.monotonic()
            if self._ended.wait(period_s) or os.getpid() != self._pid:
                return
            late_s = time.monotonic() - before_s - period_s
            if late_s > self.stall_s:
                self._tell(
                    f"no Python code could run for {late_s:.0f} s: C code held Python's lock, or the process was "
                    "stopped; the stacks above are of that time"
                )
            with suppress(Exception):  # the script goes on, whatever cannot be read
                self.look()

    def _arm(self, after_s: float) -> None:
        with self._lock:
            descriptor = self._descriptor()
            if not self._is_theirs and not self._ended.is_set() and descriptor is not None:
                with suppress(Exception):
                    self._later(after_s, file=descriptor)
                    self._is_armed = True

    def _disarm(self) -> None:
        if self._is_armed and not self._is_theirs and self._pid == os.getpid():
            self._cancel()
            self._is_armed = False

    def _disarm_to_fork(self) -> None:
        self._holds = self._lock.acquire(timeout=1)  # rather a clock in the child than no child
        self._disarm()

    def _forked(self) -> None:
        if self._holds:
            self._lock.release()

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._n_same, self._last, self.found = 0, None, []

    def _given_away(self, later: Callable[..., None]) -> Callable[..., None]:
        @wraps(later)
        def dump_traceback_later(*args: Any, **kwargs: Any) -> None:
            with self._lock:
                self._is_theirs = True
            later(*args, **kwargs)

        return dump_traceback_later


def _headline(doing: Doing, stall_s: float) -> str:
    number = doing.n_batches + 1
    if doing.what == "steps":
        return f"no batch was asked for in {stall_s:.0f} s: the step with batch {doing.n_batches} of {doing.loader}"
    what = "starts its epoch" if doing.what == "starts" else f"waits for batch {number}"
    return f"no batch for {stall_s:.0f} s: {doing.loader} {what}"


class _Process(NamedTuple):
    """A process of the training, as it is now.

    state: The kernel's letter: R runs, S sleeps, D sleeps and takes no signal, T is stopped, Z has ended.
    call: The system call in which it waits, and what on; empty if it computes or nothing is known.
    stack: Its innermost calls first: `file:line function`; empty if it did not answer.
    hand: The sample that it makes, in words.
    files: That it has open, without those of the system and of ours.
    is_forked: Whether it is a copy of this process that has executed no other program.
    """

    name: str
    pid: int
    state: str
    call: str
    stack: list[str]
    hand: str
    files: list[str]
    n_files: int
    is_forked: bool


def describe_stall(doing: Doing) -> tuple[str, list[str]]:
    """What the training hangs in, in words; and the processes, line by line."""
    iterator = doing.iterator() if doing.iterator is not None else None
    status = getattr(iterator, "_workers_status", ())  # False: it was told to end, as its data set has
    workers = {
        each.pid: number for number, each in enumerate(getattr(iterator, "_workers", ()))
        if each.pid and (number >= len(status) or status[number])
    }  # fmt: skip
    data = getattr(iterator, "_dataset", None)
    main = _main_process(doing, data)
    pids = sorted({*descendants(os.getpid()), *workers})
    others = [_process(pid, workers.get(pid), doing.folder, data) for pid in pids]
    lines = list[str]()
    for each in (main, *others):
        lines += _lines_of(each)
    for name, stack in _other_threads():
        lines += [f"  {name}, of the training:", *_shown(stack)]
    shm_free, shm = shared_memory()
    limit = file_limit()
    lines.append(
        f"  {shm_free / 1e6:.0f} of {shm / 1e6:.0f} MB of /dev/shm are free, {main.n_files} of {limit} files open."
    )
    if shm and shm_free < min(FULL_SHM * shm, FULL_SHM_BYTES):
        return "Shared memory is full: give the container more (docker run --shm-size), or use fewer workers.", lines
    if 0 < ALL_FILES * limit < main.n_files:
        return "The process has nearly all files open that it may have: see ulimit -n.", lines
    return _looks_like(doing, main, others), lines


def _looks_like(doing: Doing, main: _Process, others: list[_Process]) -> str:
    """The reason, as far as the states of the processes show one."""
    named = [each for each in others if each.name.startswith("worker")]
    if ended := [each for each in named if each.state in ("Z", "X")]:
        return f"{_names(ended)} ended, and nobody noticed: the kernel's log says whether for lack of memory."
    if stopped := [each for each in others if each.state in ("T", "t")]:
        return f"{_names(stopped)} is stopped by a signal or a debugger: kill -CONT {stopped[0].pid} lets it go on."
    if doing.what == "steps" or not named:
        return _waits(main)
    awaited = [each for each in named if each.name == f"worker {doing.worker}"]
    busy = [each for each in awaited + named if not _rests(each)]
    if not busy:
        return "All workers rest: a batch got lost between them and the training, which waits for it."
    return _waits(busy[0])


def _names(processes: list[_Process]) -> str:
    return " and ".join(f"{each.name} (process {each.pid})" for each in processes)


def _rests(worker: _Process) -> bool:
    """Whether it waits for the indices of another batch."""
    return any("_worker_loop" in call for call in worker.stack[:6]) and not worker.hand


# What a process waits for, by its system call.
_CALLS = (
    (r"\[socket|\[.*:\d+\]", "waits for {call}, which does not answer: a timeout would raise there"),
    (r"pipe:", "waits for another process: {call}"),
    (r"read|open|stat|getdents|fsync|flock|fcntl", "waits for a file: {call}"),
    (r"futex", "waits for a lock"),
    (r"nanosleep", "sleeps: a pause, or one between tries that fail"),
    (r"wait4|waitid", "waits for a process that it started"),
    (r"poll|select|epoll|recv|accept|connect|send|write", "waits for another process: {call}"),
)  # fmt: skip
_NETWORK = re.compile(r"/(socket|ssl|http/client|urllib3/\S+|aiohttp/\S+|fsspec/asyn|selectors)\.py:")


def _waits(process: _Process) -> str:
    where = f", in {process.stack[0]}" if process.stack else ", and answers no signal"
    making = f", with {process.hand}" if process.hand else ""
    words = next((words for pattern, words in _CALLS if re.search(pattern, process.call)), None)
    if words is None:
        words = "waits in the kernel, as for a disk" if process.state == "D" else "computes"
    if "file" not in words and any(map(_NETWORK.search, process.stack[:4])):
        words = "waits for a server that does not answer: {call}; a timeout would raise there"
    told = f"{process.name} {words.format(call=process.call or 'no call is known')}{where}{making}."
    if words == "waits for a lock" and process.is_forked:
        told += (
            " It was forked: if a thread of the training held that lock then, nobody in the worker can release it."
            " multiprocessing_context='forkserver' starts workers that inherit no locks."
        )
    return told[0].upper() + told[1:]


def _lines_of(process: _Process) -> list[str]:
    files = f"; open: {', '.join(process.files[:4])}" if process.files else ""
    making = f"; makes {process.hand}" if process.hand else ""
    call = process.call or _STATES.get(process.state, process.state)
    return [f"  {process.name} (process {process.pid}): {call}{making}{files}", *_shown(process.stack)]


def _shown(stack: list[str]) -> list[str]:
    return [f"    {call}" for call in stack or ["its stack is not known: it does not answer"]]


_STATES = {"R": "computes", "S": "sleeps", "D": "sleeps, and takes no signal", "T": "is stopped", "Z": "has ended"}


def _main_process(doing: Doing, data: Any) -> _Process:
    main = threading.main_thread()
    pid, files = os.getpid(), open_files(os.getpid())
    hand = _in_words(hand_here, data) if doing.worker == -1 else ""
    state, call = state_of(pid), system_call(pid, main.native_id or pid)
    return _Process("the training", pid, state, call, _calls(main), hand, *files, is_forked=False)


def _process(pid: int, worker: int | None, folder: str, data: Any) -> _Process:
    name = "another process" if worker is None else f"worker {worker}"
    hand = Hand.from_file(os.path.join(folder, f"{worker}.hand")) if folder and worker is not None else None
    found = state_of(pid), system_call(pid, pid)  # before it is asked, which may end the call
    stack = _asked_for_stack(pid, os.path.join(folder, f"{worker}.stacks") if folder else "")
    is_forked = read_text(f"/proc/{pid}/cmdline") == read_text(f"/proc/{os.getpid()}/cmdline")
    making = _in_words(hand, data) if hand else ""
    return _Process(name, pid, *found, stack, making, *open_files(pid), is_forked=is_forked)


def _in_words(hand: Hand, data: Any) -> str:
    index = hand.index
    if index is None:
        return ""
    return f"{name_of_sample(data, index)} for {time.perf_counter() - hand.since_s:.0f} s"


def name_of_sample(data: Any, index: Any) -> str:
    """`names_of` a data set for one index, which may be none."""
    if index == Hand.UNKNOWN:
        return "a sample of its stream" if hasattr(data, "__iter__") else "a sample"
    return names_of(data)(index)


def _calls(thread: threading.Thread) -> list[str]:
    """The stack of a thread, without our own calls: `file:line function`, the innermost first."""
    return _called((at[0].co_filename, line_at(at), at[0].co_name) for at in calls_of_thread(thread.ident or 0))


def _called(calls: Iterable[tuple[str, Any, str]]) -> list[str]:
    """What is shown of the calls of a stack: none of ours, and none that started a worker."""
    shown = list[str]()
    for path, line, name in calls:
        if not path.startswith(_OURS):
            shown.append(f"{short_path(path)}:{line} {name}")
        if name == "_worker_loop":
            break
    return shown[:_DEPTH]


_OURS = os.path.dirname(__file__)


def _other_threads() -> Iterator[tuple[str, list[str]]]:
    """Threads of this process besides the main one and ours."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.name.startswith(("labkit-", "QueueFeeder")):
            name = "pin thread" if "_pin_memory_loop" in thread.name else thread.name
            yield name, _calls(thread)[:4]


_PATIENCE_S = 1.0  # for an answer, which takes some milliseconds


def _asked_for_stack(pid: int, path: str) -> list[str]:
    """The innermost calls of another process; empty if it does not answer.

    It is asked only if it has our file open and catches the signal, which would end any other process.
    """
    descriptor = descriptor_of(pid, {path, answers_in()} - {""})
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", read_text(f"/proc/{pid}/status"))
    if not descriptor or caught is None or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
        return []
    with suppress(OSError), open(descriptor, "rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(pid, SIGNAL)
        text, deadline = "", time.monotonic() + _PATIENCE_S
        while not (text and text.endswith("\n")) and time.monotonic() < deadline:
            time.sleep(0.02)
            text += file.read().decode(errors="replace")
        text = text.rpartition("Current thread")[2]  # the one that the signal reached: the main one
        return _called(_LINE.findall(text))
    return []


_LINE = re.compile(r'File "(.*?)", line (\d+) in (\S+)')
