"""Which lines the time goes into: a thread of each process samples what its batches are made by.

In come the calls that a thread is in; out go the seconds of each `Line`. A C call that holds Python's lock delays a
sample, which then counts for all the times at which one was due: such a call counts for the line that called it. Lines
are those of the script's own files; where it has none in the making, those of the library that the data set is from.
Within a `Compose`, a line has its transform's name. Only the standard library is imported.
"""

import gc
import json
import os
import re
import sys
import sysconfig
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

MAKING, STEP = "making a batch", "the step"
OF_LOOP = -2  # in place of a loader's number: a loop whose loader is not known
_INTERVAL_S = 0.005
# Python lets a thread keep its lock for 5 ms while another waits for it, and begins to count anew whenever the lock is
# free for a moment, as within torch.tensor(): the sampling thread would get its look where the lock is free for longer,
# seldom and not where the time goes. So it waits for less than what lies between two such calls, but during
# the step of a loader that is known: a training process may have more threads, which would take turns as often.
_PROMPT_S = {MAKING: 5e-6, STEP: 1e-3}
_TIMER_SLACK_NS = 1  # by which the kernel may let the sampling thread wait longer; 50 us by default
_GOLDEN = 0.618
_LEAST_KEPT_S, _MOST_KEPT_S, _KEPT = 0.2, 10.0, 0.02  # of samples that a worker has not written, and share of its time
_MOST_STACKS = 2000  # that are told apart, in a few MB


Call = tuple[str, str, int]  # qualified name, file and line; a transform within a `Compose`: its name, no file, 0
At = tuple[CodeType, int]  # a call as it was seen: its code, and the offset of the instruction that it was at
Look = Callable[[Sequence[At], float], tuple[bool, Sequence[At]] | None]


class Stack(NamedTuple):
    """Calls that a thread was seen in.

    part: `MAKING` or `STEP`.
    calls: The outermost first. The script's own have the line that they were at, those of libraries their first line.
    loader: Whose batch was made, or was stepped with, by its number; -1: that is known otherwise.
    """

    part: str
    calls: tuple[Call, ...]
    loader: int = -1


class Line(NamedTuple):
    """A place in the code.

    part: `MAKING` or `STEP`.
    what: The transform, or the library's function that the line called, or the function that it is in.
    path, number: Its file and line.
    kind: `transform`, `decoding`, or empty: something else.
    """

    part: str
    what: str
    path: str
    number: int
    kind: str = ""


class LineSampler:
    """Samples the threads of this process that make batches or step.

    Args:
        path: A file that the samples are added to; default: they are kept.

    Attributes:
        seconds: Of each stack so far, as far as it is not in the file. Those of a step count once it has ended.
        loader: Whose batches are made, or stepped with, from now on.
        loop: The code of the calls that ask for its batches, the outermost first: a step begins where both part.
        cpu_s: Processor seconds of the sampling so far, which are not the program's.
        is_allowed: Whether any process samples: not with `--no-lines`, nor in a Python without its lock, where a thread
            cannot look at another one that runs.
        looks: Called with each sample of the thread of a loop whose loader is not known, by the one who found it; they
            return whether it waits, and the calls within the loop, or None.
    """

    is_allowed = getattr(sys, "_is_gil_enabled", lambda: True)()

    def __init__(self, path: str | None = None):
        self.seconds: dict[Stack, float] = defaultdict(float)
        self._known: dict[Stack, int] = {}  # with their numbers in the file
        self._path, self._n_written = path, 0
        self._thread: tuple[int, threading.Thread] | None = None  # with the process, since a fork has none
        self.loader, self.loop, self.cpu_s = -1, tuple[CodeType, ...](), 0.0
        self.looks: dict[Look, int] = {}
        self._now: tuple[int, str, int, tuple[CodeType, ...], dict[Stack, float]] | None = None
        self._stepped = list[dict[Stack, float]]()  # of steps that have ended, and are not in `seconds` yet
        self._usual_s: float | None = None  # the switch interval of the process, while it is ours
        self._prompt_s = 0.0  # ours
        self._lock = threading.Lock()  # of the interval: several threads may ask for batches

    @property
    def runs(self) -> bool:
        """Whether this process has a thread that samples."""
        return self._thread is not None and self._thread[0] == os.getpid()

    def start(self) -> None:
        """Begin to sample, in a thread, if that is allowed."""
        if not LineSampler.is_allowed:
            return
        self.seconds.clear()
        self._stepped.clear()
        self._known.clear()
        self._thread = os.getpid(), threading.Thread(target=self._run, name="labkit-lines", daemon=True)
        self._thread[1].start()

    def stop(self) -> None:
        """Sample no more."""
        self._now = self._thread = None
        self.looks.clear()
        self.restore()

    def begin(self, part: str) -> None:
        """The calling thread begins a part of its work."""
        loop, counts = ((), self.seconds) if part == MAKING else (self.loop, defaultdict[Stack, float](float))
        self._now = threading.get_ident(), part, self.loader, loop, counts
        self._hasten(part)

    def look_at(self, thread: int, look: Look) -> None:
        """Sample a thread from now on, whatever it does, and let each sample be judged."""
        self.looks[look] = thread
        self._hasten(MAKING)

    def look_no_more(self, look: Look) -> None:
        """Undo `look_at`."""
        self.looks.pop(look, None)
        self.restore()

    def _hasten(self, part: str) -> None:
        """Let no thread keep Python's lock for longer than is good for samples of this part, if there are any."""
        if not self.runs:
            return
        with self._lock:
            if self._usual_s is None:
                self._usual_s = sys.getswitchinterval()
            self._prompt_s = _PROMPT_S[part]
            sys.setswitchinterval(self._prompt_s)

    def end(self, *, is_left: bool = False) -> None:
        """It waits, or does what is not looked at.

        Args:
            is_left: The loop over the batches was left, so that what was seen since the last one was no step.
        """
        now = self._now
        if now is not None and now[0] == threading.get_ident():
            self._now = None
            if now[1] == STEP and now[-1] and not is_left:
                self._stepped.append(now[-1])
        self.restore()

    def restore(self) -> None:
        """Give the process its switch interval back, unless the script has set its own, or a thread is looked at."""
        with self._lock:
            if self._usual_s is None or abs(sys.getswitchinterval() - self._prompt_s) > 1e-6:
                self._usual_s = None
            elif self.looks:
                self._prompt_s = _PROMPT_S[MAKING]
                sys.setswitchinterval(self._prompt_s)
            else:
                usual_s, self._usual_s = self._usual_s, None
                sys.setswitchinterval(usual_s)

    def forked(self) -> None:
        """In a process that was forked: give it its switch interval back; the lock may be another thread's."""
        self._lock = threading.Lock()
        self.looks.clear()
        self.restore()

    def making(self, make: Callable[..., Any], *args: Any) -> Any:
        """Call a function that makes a batch."""
        self.begin(MAKING)
        try:
            return make(*args)
        finally:
            self.end()

    def _run(self) -> None:
        with suppress(OSError), open(f"/proc/{threading.get_native_id()}/timerslack_ns", "w") as file:
            file.write(str(_TIMER_SLACK_NS))
        began_s = due_s = flushed_s = time.perf_counter()
        spread = noted_s = 0.0
        while self._thread is not None and self._thread[1] is threading.current_thread():
            time.sleep(max(0.0, due_s - time.perf_counter()))
            now, now_s, was_due_s = self._now, time.perf_counter(), due_s
            due_s += max(0, int((now_s - due_s) / _INTERVAL_S)) * _INTERVAL_S
            spread = (spread + _GOLDEN) % 1  # not in step with what is sampled
            due_s += (0.5 + spread) * _INTERVAL_S
            if now is not None:
                thread, part, loader, loop, counts = now
                self.add(calls_of_thread(thread), due_s - was_due_s, part, loader, loop, counts)
            for look, thread in list(self.looks.items()):
                self._look(look, thread, due_s - was_due_s, is_known=now is not None and now[0] == thread)
            while self._stepped:
                for stack, seconds in self._stepped.pop().items():
                    self.seconds[stack] += seconds
            keep_s = min(_MOST_KEPT_S, max(_LEAST_KEPT_S, _KEPT * (now_s - began_s)))
            if self._path and self.seconds and now_s - flushed_s > keep_s:
                self._flush()
                flushed_s = now_s
            own_s = time.thread_time()
            self.cpu_s, noted_s = self.cpu_s + own_s - noted_s, own_s

    def _look(self, look: "Look", thread: int, seconds: float, *, is_known: bool) -> None:
        """Let a sample be judged, and count it, unless it counts already for a loader that is known."""
        with suppress(Exception):  # code of any kind
            found = look(calls_of_thread(thread), seconds)
            if found is not None and not is_known:
                self.add(found[1], seconds, MAKING if found[0] else STEP, OF_LOOP)

    def counted(self) -> dict[Stack, float]:
        """Seconds of each stack so far; may be called while the sampling goes on."""
        found = defaultdict(float, self.seconds.copy())
        for counts in self._stepped.copy():
            for stack, seconds in counts.copy().items():
                found[stack] += seconds
        return found

    def add(
        self, seen: Sequence[At], seconds: float, part: str, loader: int = -1, loop: Sequence[CodeType] = (),
        counts: dict[Stack, float] | None = None,
    ) -> None:  # fmt: skip
        """Count seconds for the calls that a thread was seen in, the innermost first; default: in `seconds`."""
        calls = _calls_of(part, seen, max(0, _n_common(seen, loop) - 1))
        if not calls and part == STEP:
            return
        stack = Stack(part, calls, loader)  # without calls: what makes batches of the samples that others make
        if stack not in self._known:
            if len(self._known) >= _MOST_STACKS:
                stack = Stack(part, (line_of(stack)[1:4],), loader)
            self._known.setdefault(stack, len(self._known))
        (self.seconds if counts is None else counts)[stack] += seconds

    def _flush(self) -> None:
        with suppress(OSError), open(str(self._path), "a") as file:  # a full disk must not end the training
            new = [(self._known[stack], *stack) for stack in islice(self._known, self._n_written, None)]
            seconds = [(self._known[stack], each) for stack, each in self.seconds.items()]
            file.write(f"\n{json.dumps([new, seconds])}\n")  # also behind a line of which a full disk took only a part
            self._n_written = len(self._known)
        self.seconds.clear()


def read_stacks(folder: str) -> dict[Stack, float]:
    """Seconds of each stack that the workers of one iterator wrote."""
    found: dict[Stack, float] = defaultdict(float)
    for path in Path(folder).glob("*.lines"):
        known = dict[int, Stack]()
        for text in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):  # a killed worker, or a full disk, may leave part of one
                new, seconds = json.loads(text)
                known |= {n: Stack(part, tuple(map(tuple, calls)), loader) for n, part, calls, loader in new}
                for number, each in seconds:
                    if number in known:
                        found[known[number]] += each
    return found


_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in _PLACES})
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LABKIT = os.path.dirname(os.path.dirname(__file__))
_DATA = os.path.join("torch", "utils", "data", "")
# What calls the code that makes a batch.
_MACHINERY = tuple(_DATA + name for name in ("_utils/fetch.py", "_utils/worker.py", "dataset.py", "dataloader.py"))
_OWN, _LIBRARY, _CALLER = range(3)
_kinds: dict[str, int] = {}  # by file


def _kind_of(path: str) -> int:
    kind = _kinds.get(path)
    if kind is None:
        is_caller = path.endswith(_MACHINERY) or path.startswith(os.path.dirname(__file__))
        kind = _kinds[path] = _CALLER if is_caller else _LIBRARY if _is_library(path) else _OWN
    return kind


def _is_library(path: str) -> bool:
    """Whether a file is Python's or an installed package's, or none: a module that is frozen, a string."""
    if path.startswith(("<frozen", "<string>")) or any(part in path for part in _PACKAGES):
        return True
    if os.path.realpath(path).startswith(tuple(folder + os.sep for folder in (*_LIBRARIES, _LABKIT))):
        return True
    return any(path.startswith(folder + os.sep) and _has_packages(folder) for folder in sys.path if folder)


@cache
def _has_packages(folder: str) -> bool:
    """Whether pip has installed there, as it does with `--target`."""
    with suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def is_own(path: str) -> bool:
    """Whether a file is one of the script's own, and no library's."""
    return bool(path) and _kind_of(path) == _OWN


# Of torchvision (v1, v2) and Albumentations: methods that call one transform after the other, and classes whose methods
# call those of the transform itself.
_COMPOSES = ("Compose.__call__", "Compose.forward", "Sequential.__call__")
_BASES = ("Compose", "BaseCompose", "Module", "Transform", "BasicTransform", "DualTransform", "ImageOnlyTransform")
_COMPREHENSIONS = (".<locals>.<listcomp>", ".<locals>.<genexpr>", ".<locals>.<dictcomp>", ".<locals>.<setcomp>")
_BETWEEN = ("Module._wrapped_call_impl", "Module._call_impl")  # of torch, above each `forward`: they say nothing
_MOST_IN_ROW, _MOST_CALLS = 16, 48  # calls of libraries that follow one another, and calls of a stack, that are kept


class _Code(NamedTuple):
    """What is always the same of a function; its code is kept, so that no other one gets its `id`."""

    code: CodeType
    kind: int
    is_compose: bool
    is_between: bool
    transform: str  # whose method it is, if a `Compose` calls it
    call: Call
    lines: list[tuple[int, int]]  # the offset at which each begins, and its number


_MOST_CODES = 10_000
_codes: dict[int, _Code] = {}  # hashing code itself takes longer than all else


def _code_of(code: CodeType) -> _Code:
    name, path = code.co_qualname, code.co_filename
    call = name, path, code.co_firstlineno
    if len(_codes) >= _MOST_CODES:  # of a script that makes code as it runs
        _codes.clear()
        _kinds.clear()
    kind, is_compose, is_between = _kind_of(path), name in _COMPOSES, name in _BETWEEN
    lines = [(start, line) for start, _, line in code.co_lines() if line is not None]
    found = _codes[id(code)] = _Code(code, kind, is_compose, is_between, _transform_of(name, kind), call, lines)
    return found


def line_at(at: At) -> int:
    """The number of the line that a call was at."""
    known = _codes.get(id(at[0])) or _code_of(at[0])
    number = bisect_right(known.lines, at[1], key=itemgetter(0)) - 1
    return known.lines[number][1] if number >= 0 else known.call[2]


def _transform_of(name: str, kind: int) -> str:
    """The class of a method, or a function's own name, by its qualified name; empty for a base class of transforms."""
    of_method, _, own_name = _function_of(name).rpartition(".<locals>.")[2].rpartition(".")
    owner = of_method.rpartition(".")[2] or own_name
    is_base = owner in _BASES or (kind == _LIBRARY and owner.startswith("_"))
    return "" if is_base else owner


def _function_of(name: str) -> str:
    """The function that a comprehension is in, which has a frame of its own before Python 3.12; else the name."""
    while name.endswith(_COMPREHENSIONS):
        name = name.rpartition(".<locals>.")[0]
    return name


def calls_asking(frame: Any) -> tuple[CodeType, ...]:
    """The code of the calls that a frame is in, the outermost first."""
    found = list[CodeType]()
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found[::-1])


_CODE_AND_OFFSET = attrgetter("f_code", "f_lasti")


def calls_of_thread(thread: int) -> list[At]:
    """The calls that another thread of this process is in, the innermost first.

    CPython lets that thread run on between any two bytecodes of this one, and a frame that ends meanwhile leaves those
    who walk its calls with freed memory: CPython 3.11 crashes. So frames are found and walked within one call of C,
    during which Python's lock is held, by iterators that are written in C. When it returns, nothing has a frame, which
    would keep alive what the call had. `faulthandler` would need no frames, but writes each name by itself: 480 us
    where this takes 3.
    """
    found, was_enabled = list[At](), list[bool]()
    try:  # `suppress` would be called, and threads switch at calls
        found.extend(_walk(thread, was_enabled))
    except AttributeError:  # of None, which calls the outermost
        pass
    finally:
        if was_enabled and was_enabled[0]:
            gc.enable()
    return found


def _walk(thread: int, was_enabled: list[bool]) -> Iterator[At]:
    """The calls of a thread, found and walked as this is iterated; it ends with an AttributeError.

    Before CPython 3.12, allocating a frame may collect garbage, whose finalizers let other threads run, or wait forever
    for a lock that `_current_frames` has. So the collector rests meanwhile, and `was_enabled` gets whether it ran. From
    then until it runs again there is no bytecode at which CPython 3.11 switches threads, so that a script's own
    `gc.disable` cannot come between.
    """
    frames: Any = iter(sys._current_frames, None)
    if sys.version_info < (3, 12):
        noting: Any = map(was_enabled.append, iter(gc.isenabled, None))
        frames = map(itemgetter(2), zip(noting, iter(gc.disable, 0), frames, strict=False))
    innermost = islice(map(methodcaller("get", thread), frames), 1)
    return map(_CODE_AND_OFFSET, accumulate(chain(innermost, repeat("f_back")), getattr))


def _n_common(calls: Sequence[At], loop: Sequence[CodeType]) -> int:
    """Calls that a stack has in common with those that ask for batches: the innermost of them is the loop."""
    n_common = 0
    for asking, (code, _) in zip(loop, reversed(calls), strict=False):
        if asking is not code:
            break
        n_common += 1
    return n_common


def _calls_of(part: str, seen: Sequence[At], n_outside: int = 0) -> tuple[Call, ...]:
    """The calls of a stack that count, the outermost first; none: nothing but what calls the making.

    Those outside the loop over the batches are left out, where it is known: a trainer's loop is in a library.
    """
    found, row, inner = list[Call](), list[Call](), ""
    outermost: At | None = None
    for at in seen[: len(seen) - n_outside]:
        _, kind, is_compose, is_between, transform, call, _ = _codes.get(id(at[0])) or _code_of(at[0])
        if kind == _CALLER and part == STEP:  # such as what notes that backward() was called
            continue
        if kind == _CALLER:
            break
        if is_compose and inner:
            row.append((inner, "", 0))
        inner = transform or inner
        if kind == _OWN:
            found += _shortened(row)
            row = []
            found.append((call[0], call[1], line_at(at)))
        elif not is_between:
            row.append(call)
            outermost = at
    if part == MAKING or n_outside or not found:  # else what calls the script, as a notebook's kernel does
        found += _shortened(row)
    if found and row and found[-1] is row[-1] and outermost:
        found[-1] = (*found[-1][:2], line_at(outermost))
    return tuple(found[_MOST_CALLS - 1 :: -1])


def _shortened(row: list[Call]) -> list[Call]:
    """Calls of libraries, the innermost first, without those far below the line that calls them."""
    n_left_out = len(row) - _MOST_IN_ROW
    return row if n_left_out <= 0 else [call for n, call in enumerate(row) if n >= n_left_out or not call[1]]


def line_of(stack: Stack) -> Line:
    """The line that a stack counts for: the script's own innermost one, else the library's outermost one.

    It is told by what it calls. A library's calls its own functions, whose names say less than those of the library
    that does the work: `load` of Pillow.
    """
    own = max((n for n, (_, path, _) in enumerate(stack.calls) if is_own(path)), default=None)
    calls = [(name, path) for name, path, _ in stack.calls[own or 0 :] if path]
    if not calls:
        return Line(stack.part, "", "", 0)
    of_users = [
        (name, path) for name, path in calls[1:]
        if "<locals>" not in name and not name.rpartition(".")[2].startswith("_")
    ]  # fmt: skip
    if own is None:
        of_users = [each for each in of_users if _package_of(each[1]) != _package_of(calls[0][1])] or of_users
    name, path = next(iter(of_users), calls[0])
    name = _function_of(name)
    called = ".".join(name.split(".")[-2:]) if name.endswith((".forward", ".__call__")) else name.rpartition(".")[2]
    transform = next((name for name, path, _ in reversed(stack.calls) if not path), "")
    kind = "transform" if transform else _kind_of_call(called, short_path(path))
    return Line(stack.part, transform or called, *stack.calls[own or 0][1:], kind)


# Functions that decode, and packages of which they are; Pillow decodes on first use, as in `convert`.
_DECODERS = {"open", "load", "convert", "pil_loader", "imread", "imdecode", "read_image", "decode_image", "decode_jpeg"}
_DECODING = ("PIL/", "cv2/", "torchvision/", "imageio/", "skimage/", "torchcodec/", "turbojpeg")
_TRANSFORMING = ("torchvision/transforms/", "albumentations/", "kornia/")


def _kind_of_call(name: str, path: str) -> str:
    if name in _DECODERS and path.startswith(_DECODING):
        return "decoding"
    return "transform" if path.startswith(_TRANSFORMING) else ""


def _package_of(path: str) -> str:
    return short_path(path).partition(os.sep)[0]


def short_path(path: str) -> str:
    """A file's name below the folder that it is imported from: `torch/utils/data/dataloader.py`, or `a cell`."""
    if re.search(r"\bipykernel_\d+\b", path):
        return "a cell"
    if found := next((part for part in _PACKAGES if part in path), ""):
        return path.rpartition(found)[2]
    folders = [folder + os.sep for folder in map(os.path.realpath, sys.path) if path.startswith(folder + os.sep)]
    return path[len(max(folders, key=len, default="")) :]


def lines_of(seconds: Mapping[Stack, float]) -> dict[Line, float]:
    """Seconds of each line, from those of stacks."""
    found: dict[Line, float] = defaultdict(float)
    for stack, each in seconds.items():
        found[line_of(stack)] += each
    return found
