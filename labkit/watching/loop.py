"""Which loop trains, and how long it waits for its batches, wherever they come from: by where its code stands.

In come calls of `backward` and `step`, and samples of the calls that their thread is in; out goes a `SeenLoader`.

A training calls `backward` once a batch, or an optimizer's `step`. Whatever loop that is called in, this is the one
that trains, and it asks for a batch where it begins again (`for batch in ...`) or at a call of `next`. While its thread
stands there it waits, in whatever library; anywhere else within the loop, it steps. So neither the loader's class need
be known, nor the optimizer's. The instruction that the thread is at is sampled; when `backward` is called is known.
"""

import dis
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import dropwhile, pairwise
from typing import Any, NamedTuple

from labkit.watching.lines import OF_LOOP, At, calls_of_thread, is_own, line_at, short_path
from labkit.watching.loaders import MOST_NOTED, Batch, Epoch, LoaderTraits, SeenLoader

# Calls by which loops ask for batches that are no `for`: of iterators, queues, and functions such as nanoGPT's.
_ASKING = ("next", "__next__", "get", "get_batch", "next_batch")
_LEAST_APART_S = 0.05  # outside of the loop, as for a validation: less is the beginning of an epoch


class Site(NamedTuple):
    """Where a loop asks for its next batch: an instruction, by the `id` of its code."""

    code: int
    offset: int


class _Code(NamedTuple):
    """What is always the same of a function; its code is kept, so that no other one gets its `id`."""

    code: Any
    offsets: list[int]  # of its instructions
    asks: dict[int, tuple[int, int]]  # offset of what asks, and from where to where its loop goes
    counts: set[int]  # those that count, and ask for nothing: `for step in range(1000)`


_codes: dict[int, _Code] = {}


def _code_of(code: Any) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        # CPython 3.11 has two instructions for a call, of which either may make it.
        every = list(dis.get_instructions(code))
        instructions = [each for before, each in pairwise([every[0], *every]) if before.opname != "PRECALL"]
        offsets = [each.offset for each in instructions]
        found = _codes[id(code)] = _Code(code, offsets, _asking_in(instructions), _counting_in(instructions))
    return found


def _asking_in(instructions: Sequence[dis.Instruction]) -> dict[int, tuple[int, int]]:
    """Where a function asks for batches, by the offset of the instruction, with the extent of the loop around it."""
    asks = {each.offset: (each.offset, each.argval) for each in instructions if each.opname == "FOR_ITER"}
    whole = instructions[0].offset, instructions[-1].offset + 1
    jumps = [(each.argval, each.offset + 1) for each in instructions if "JUMP_BACKWARD" in each.opname]
    loops = _whole([*asks.values(), *jumps])
    for number, each in enumerate(instructions):
        asks_by_name = each.opname.startswith("LOAD_") and each.argval in _ASKING
        if asks_by_name and (call := _call_of(each, instructions[number:])) is not None:
            around = [(first, last) for first, last in loops if first <= call < last]
            asks[call] = min(around, key=lambda extent: extent[1] - extent[0], default=whole)
    return asks


def _counting_in(instructions: Sequence[dis.Instruction]) -> set[int]:
    """Where a loop goes through numbers: it is over a call of `range`, or over one of that in a bar."""
    found, called = set[int](), list[str]()
    for each in instructions:
        if each.opname.startswith(("STORE_", "POP_TOP", "JUMP")):
            called.clear()  # another statement
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_METHOD", "LOAD_ATTR"):
            called.append(each.argval)
        if each.opname == "MAKE_FUNCTION":
            called.append("")  # a generator expression, whatever it goes through
        if each.opname == "FOR_ITER":
            functions = dropwhile(lambda name: name in ("tqdm", "enumerate"), called)
            if next(functions, None) in ("range", "trange", "count"):
                found.add(each.offset)
    return found


def _whole(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The loops, in which each `continue` jumps back, too: those that begin alike, or overlap, are one."""
    found = list[tuple[int, int]]()
    for first, last in sorted(loops):
        for one in [one for one in found if one[0] == first or first < one[1] < last]:
            found.remove(one)
            first, last = min(first, one[0]), max(last, one[1])
        found.append((first, last))
    return found


def _call_of(name: dis.Instruction, following: Sequence[dis.Instruction]) -> int | None:
    """The offset of the call of a function: its expression begins where the one of the function does."""
    begins = name.positions and name.positions[::2]
    if not begins or None in begins:  # `python -X no_debug_ranges`
        return None
    calls = (each for each in following if each.opname.startswith(("CALL", "PRECALL")) and each.positions)
    return next((each.offset for each in calls if each.positions[::2] == begins), None)  # type: ignore[index]


def _loops_at(call: At) -> tuple[Site, list[Site]]:
    """The instruction that a call is at, and the loops that it is in there, the innermost first.

    An offset may be that of a cache, which belongs to the instruction before it.
    """
    known, code = _code_of(call[0]), id(call[0])
    offset = known.offsets[max(0, bisect_right(known.offsets, call[1]) - 1)]
    loops = sorted((last - first, ask) for ask, (first, last) in known.asks.items() if first <= offset < last)
    return Site(code, offset), [Site(code, ask) for _, ask in loops]


_Place = tuple[Site, ...]  # the innermost loop, and the calls from there to the one that steps


class _Step(NamedTuple):
    """A call of `backward` or `step`.

    place: Where it is called from: the innermost loop, and the calls within it. A batch begins where one comes again.
    is_step: Whether it is a `step`.
    waits_s: Seconds of waiting since the one before, by where.
    within_s: Seconds of everything else since then, by the innermost loop; None: in no loop that trains.
    """

    place: _Place
    is_step: bool
    time_s: float
    cpu_s: float
    waits_s: dict[Site, float]
    within_s: dict[Site | None, float]


class LoopWatch:
    """Finds the loop that trains, where none of the loaders that are known gives its batches.

    Args:
        clock: Gives seconds.

    Attributes:
        thread: The thread that trains; None as long as that is not known.
        n_steps: Calls of `backward` so far, or if there are none, steps of optimizers.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.thread: int | None = None
        self.n_steps = self._n_backward = 0
        self._clock = clock
        self._steps = list[_Step]()
        self._around: dict[_Place, tuple[Site, ...]] = {}  # loops of each place, the innermost first
        self._sites = set[Site]()  # of all of these
        self._likely = set[Site]()  # those in the loop that trains, as far as could be told when there were fewer steps
        self._waits_s: dict[Site, float] = defaultdict(float)
        self._within_s: dict[Site | None, float] = defaultdict(float)

    @property
    def name(self) -> str:
        """`the loop at train.py:41`, as far as it is known."""
        return f"the loop at {_place(self._loop())}" if self._steps else ""

    def is_within(self) -> bool:
        """Whether the calling thread is in the loop that trains, so that its epoch goes on."""
        inside = self._inside(self._loop()) if self._steps else set()
        return any(inside & {*_loops_at(call)[1]} for call in calls_of_thread(threading.get_ident()))

    def stepped(self, *, is_step: bool = False) -> None:
        """Called by `backward` and an optimizer's `step`, in the thread that trains."""
        around, path = list[Site](), list[Site]()
        for call in _of_the_training(calls_of_thread(threading.get_ident())):
            here, loops = _loops_at(call)
            path += [here] * (not around)
            around += [loop for loop in loops if loop != here]
        if not around:
            return
        place = around[0], *path
        self._around.setdefault(place, tuple(around))
        self._sites.update(around)
        self.thread = threading.get_ident()
        self._n_backward += not is_step
        self.n_steps = self._n_backward or self.n_steps + 1
        waits_s, within_s = dict(self._waits_s), dict(self._within_s)
        self._waits_s.clear()
        self._within_s.clear()
        if not len(self._steps) & (len(self._steps) - 1):  # at 0, 1, 2, 4, 8, ...
            self._likely = self._inside(self._loop()) if self._steps else set()
        if len(self._steps) < MOST_NOTED:
            self._steps.append(_Step(place, is_step, self._clock(), time.process_time(), waits_s, within_s))

    def look(self, calls: Sequence[At], seconds: float) -> tuple[bool, Sequence[At]] | None:
        """Count a sample of the thread.

        Args:
            calls: That it is in, the innermost first.
            seconds: That the sample counts for.

        Returns:
            Whether it waits, and the calls within the loop; None: it is in no loop that trains.
        """
        waits, within, n_inside = None, None, 0
        for number, call in enumerate(calls, 1):
            here, loops = _loops_at(call)
            if here in self._sites:
                waits, n_inside = here, number
            if of_training := [loop for loop in loops if loop in self._sites]:
                within, n_inside = within or of_training[0], number
        if waits is not None:
            self._waits_s[waits] += seconds
        else:
            self._within_s[within] += seconds
            if self._likely and within not in self._likely:
                return None  # such as a validation
        return (waits is not None, calls[:n_inside]) if n_inside else None

    def loader(self, number: int) -> SeenLoader | None:
        """What was seen, as of a loader with this number; None: of fewer than two batches."""
        if not self._steps:
            return None
        loop = self._loop()
        in_it = [step for step in self._steps if step.place[0] == loop]  # not those of a loop within it
        if len(in_it or self._steps) < 2:
            return None
        inside = self._inside(loop)
        if all(site.offset in _codes[site.code].counts for site in inside):
            return None  # it asks for its batches by a call of a name that is not known
        seen = SeenLoader(number, f"the loop at {_place(loop)}", LoaderTraits(), has_gradients=True, is_sampled=True)
        before, waited_s, apart_s, n_optimized = self._steps[0], 0.0, 0.0, 0
        passed = {before.place}
        epoch = self._epoch(before.time_s)
        for n_backward, step in enumerate(self._steps[1:], 1):
            n_optimized += step.is_step
            of_step_s = sum(seconds for site, seconds in step.waits_s.items() if site in inside)
            waited_s += of_step_s
            apart_s += sum(seconds for site, seconds in step.within_s.items() if site not in inside)
            if (in_it and step.place[0] != loop) or not (of_step_s > 0 or step.place in passed):
                passed.add(step.place)  # of the same batch: nothing was waited for, and it was not here before
                continue
            passed = {step.place}
            if apart_s > _LEAST_APART_S:
                epoch.ended_s = before.time_s
                seen.epochs.append(epoch)
                epoch = self._epoch(before.time_s + apart_s)
            asked_s = max(epoch.began_s, before.time_s)
            received_s = min(step.time_s, asked_s + waited_s)
            times = asked_s, received_s, None, None, n_optimized, before.cpu_s, before.cpu_s, 0.0, "training"
            epoch.batches.append(Batch(*times, n_backward=n_backward))
            # A sample may count for longer than its batch took: the rest is of batches that had none.
            before, waited_s, apart_s = step, waited_s - (received_s - asked_s), 0.0
        epoch.ended_s = None if self._clock() <= before.time_s or self.is_within() else before.time_s
        seen.epochs.append(epoch)
        return seen

    def _epoch(self, began_s: float) -> Epoch:
        return Epoch(began_s, self.thread or 0, key=OF_LOOP)

    def _loop(self) -> Site:
        """The loop over batches: of those around most steps, the one that waits longest, or the innermost."""
        waits_s = Counter[Site]()
        for step in self._steps:
            waits_s.update(step.waits_s)
        counts = Counter(step.place for step in self._steps)
        around = self._around[max(counts, key=lambda place: counts[place])]
        return max(around, key=lambda site: waits_s[site])

    def _inside(self, loop: Site) -> set[Site]:
        """The loop, and those within it."""
        known = [around for around in self._around.values() if loop in around]
        begins = _begins(loop)  # it may ask in several places
        n_inside = [1 + max(n for n, site in enumerate(around) if _begins(site) == begins) for around in known]
        return {site for around, n in zip(known, n_inside, strict=True) for site in around[:n]}


def _begins(site: Site) -> tuple[int, int]:
    return site.code, _codes[site.code].asks[site.offset][0]


def _place(site: Site) -> str:
    code = _codes[site.code].code
    return f"{short_path(code.co_filename)}:{line_at((code, site.offset))}"


def _of_the_training(calls: Sequence[At]) -> list[At]:
    """The calls between torch's own, and ours, and those that started the script, such as a notebook's kernel."""
    folders = tuple(os.path.dirname(file) + os.sep for file in (__file__, sys.modules["torch"].__file__ or "") if file)
    found = [*dropwhile(lambda call: call[0].co_filename.startswith(folders), calls)]
    n_kept = max((number for number, call in enumerate(found, 1) if is_own(call[0].co_filename)), default=len(found))
    return found[:n_kept]
