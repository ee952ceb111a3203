"""What a training does with its loaders, noted in its process: when each batch was asked for, and when it came.

In come calls from `labkit.watching.hooks`; out goes what stands in a `Record`, of the classes of `loaders`, for
`accounts` and `findings` to read. Only the standard library is imported.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

from labkit.watching.device import DeviceTimes
from labkit.watching.lines import STEP, LineSampler, Stack, calls_asking, read_stacks
from labkit.watching.loaders import (
    MOST_NOTED,
    Batch,
    Control,
    Epoch,
    Known,
    LoaderTraits,
    SeenLoader,
    look_at,
    names_of,
)
from labkit.watching.loop import LoopWatch
from labkit.watching.resources import ResourceWatch, data_places
from labkit.watching.stalls import Doing, StallWatch
from labkit.watching.worker import (
    MOST_SAMPLE_BYTES,
    BatchTiming,
    Noted,
    Samples,
    TimedWorker,
    making,
    read_samples,
    read_times,
    run_queue_s,
    samples_of,
)


class Asking(threading.local):
    """The epoch whose next batch this thread waits for, to which a batch that it makes itself belongs."""

    epoch: Any = None
    loaded_s = 0.0
    pins = False


asking = Asking()

_NAMED = 4  # loaders whose samples have names
_MOST_IN_ALL = 200_000  # batches of a run, in some 70 MB
_LOOKS = 3  # epochs whose first batch is looked at
_MOST_OF_A_BATCH = 64  # calls of `backward` and steps that a batch may have, as where it is accumulated in parts


class Record:
    """Notes every batch that the loaders of the current process give, and the loop that trains over others.

    Attributes:
        loaders: In the order in which they were first iterated.
        main: The one to report on; None: the one of the training that gives most.
        loader_s: Seconds per batch of that one alone; None if it was not measured.
        saves: Of checkpoints: when they began and ended, and the thread.
        failed: What could not be observed, and why.
        doing: What a stall would be a stall of; a new object each time.
        control: Decides what the loaders give.
        takes_lines: Whether stacks are sampled, without which nothing is known of a loop over others.
    """

    loaders: list[SeenLoader]
    loop: LoopWatch

    def __init__(self) -> None:
        self.device = DeviceTimes()
        self.stalls: StallWatch | None = None
        self.failed, self.takes_lines = list[str](), LineSampler.is_allowed
        self._scratch: str | None = None
        self._undo = ExitStack()
        self.forget()

    def forget(self) -> None:
        """Begin again, in a forked process: what was seen so far is its parent's."""
        self.loaders = []
        self.saves: list[tuple[float, float, int]] = []
        self.doing: Doing | None = None
        self.main: SeenLoader | None = None
        self.loader_s: float | None = None
        self.n_steps, self.n_backward = Counter[int](), Counter[int]()  # by thread
        self.control, self.resources = Control(), ResourceWatch()
        self.loop = LoopWatch()
        self._in_backward = set[int]()  # threads
        self._since_given: dict[int, int] = {}  # calls since a loader that is known gave a batch, by thread
        self._seen, self._epochs, self._pinning_for = Known(), Known(), Known()
        self._alike: dict[Any, tuple[SeenLoader, ref[Any], int]] = {}  # the newest loader of each description
        self._lock = threading.Lock()
        self._n_noted = self._n_sample_bytes = 0
        self.device.forget()

    def stop(self) -> None:
        """Note no more, end the threads, and remove what workers left."""
        self._undo.close()

    def watch_stalls(self, stall_s: float, terminal: Any) -> None:
        """Say there what the training hangs in when it has got no batch for so long; from its first epoch on."""
        self.stalls = StallWatch(stall_s, lambda: self.doing, terminal.tell, lambda: terminal.descriptor)
        self.stalls.give_way()

    # What was noted.

    @property
    def training(self) -> list[SeenLoader]:
        """The loaders between whose batches optimizers step; if none do, `backward` is called; or gradients are on.

        A validation may call `backward`, too, as where forces are gradients.
        """
        steps = [loader for loader in self.loaders if loader.steps]
        differentiate = [loader for loader in self.loaders if loader.differentiates]
        return steps or differentiate or [loader for loader in self.loaders if loader.has_gradients]

    @contextmanager
    def with_loop(self) -> Iterator[None]:
        """With the loop over what is not known among the loaders, where that may be the training."""
        known = self.loaders
        if self.takes_lines and self.loop.thread is not None:  # None while known loaders give all batches
            self.loaders = [*known, *self._training_loop()]
        try:
            yield
        finally:
            self.loaders = known

    def _training_loop(self) -> list[SeenLoader]:
        """That loop as a loader; none where another loader is the training's."""
        loop, training = self.loop.loader(len(self.loaders)), [loader for loader in self.loaders if loader.trains]
        if loop is not None and training:
            is_longer = all(loop.n_batches > loader.n_batches for loader in training)
            # An optimizer that steps once an epoch does so in the loop over the epochs, which computes no gradients.
            if not loop.differentiates or not (is_longer or not any(loader.steps for loader in training)):
                return []
        return [loop] if loop is not None else []

    @property
    def hung(self) -> list[str]:
        """What each stall looked like."""
        return self.stalls.found if self.stalls is not None else []

    def times(self, loader: SeenLoader) -> dict[int, dict[int, list[BatchTiming]]]:
        """What the workers noted of each batch, by the epoch that started them, and by worker; before `stop`."""
        return {first: read_times(folder) for first, folder in loader.folders.items()}

    def stacks(self) -> dict[Stack, float]:
        """Seconds of each stack of the loaders that train, in this process and in the workers; before `stop`."""
        loaders, found = self.training or self.loaders, defaultdict[Stack, float](float)
        keys = {epoch.key for loader in loaders for epoch in loader.epochs}  # of a loop: `OF_LOOP`
        for (part, calls, loader), seconds in making.lines.counted().items():
            if loader in keys:
                found[Stack(part, calls)] += seconds
        for folder in (folder for loader in loaders for folder in loader.folders.values()):
            for stack, seconds in read_stacks(folder).items():
                found[stack] += seconds
        return found

    def samples(self, loader: SeenLoader, *, settled: bool = False) -> Samples:
        """Index and seconds of each sample that was made by itself; before `stop`.

        Args:
            loader: Whose samples.
            settled: Leave out the first one of each process, which also does what is done once, such as imports.
        """
        here = [sample for epoch in loader.epochs for batch in epoch.samples for sample in samples_of(batch)]
        of_processes = [here, *(each for folder in loader.folders.values() for each in read_samples(folder))]
        return [sample for each in of_processes for sample in each[settled:]]

    # What hooks call.

    def starts(self, iterator: Any, loader: Any) -> None:
        """One of torch's iterators is made, which begins an epoch of the loader."""
        found = self._begin(loader)
        self._epochs.put(iterator, found)
        self._does("starts", *found, None, iterator)

    @contextmanager
    def starting_workers(self, iterator: Any, loader: Any, change: Callable[[ModuleType], object]) -> Iterator[None]:
        """Its workers are started within this block, and note what they make; `change` changes torch there."""
        own, folder = loader.worker_init_fn, self.folder()
        loader.worker_init_fn = TimedWorker(own, folder, change) if folder else own
        try:
            yield
        finally:
            loader.worker_init_fn = own
        workers = getattr(iterator, "_workers", ())
        self.resources.memory.add([pid for each in workers if (pid := getattr(each, "pid", None))])
        if folder:
            seen, _ = self._epochs.get(iterator)
            seen.folders[len(seen.epochs) - 1] = folder
            if (thread := getattr(iterator, "_pin_memory_thread", None)) is not None:
                self._pinning_for.put(thread, seen)

    def begins_again(self, iterator: Any, loader: Any, *, is_first: bool) -> None:
        """An iterator whose workers persist begins an epoch; the first one has begun when it was made."""
        before = self._epochs.get(iterator)
        if before is None or (not is_first and before[1].batches):
            seen, epoch = self._begin(loader)
            epoch.number = before[1].number + 1 if before else 0
            self._epochs.put(iterator, (seen, epoch))

    def gives(self, iterator: Any, give: Callable[[], Any]) -> Any:
        """The next batch of one of torch's iterators, which `give` makes."""
        seen, epoch = self._epochs.get(iterator) or self._began_before(iterator)
        return self._give(seen, epoch, give, iterator)

    def stepped(self, *_: Any) -> None:
        """An optimizer has stepped."""
        self.n_steps[threading.get_ident()] += 1
        self._trains(is_step=True)

    def differentiates(self, backward: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Let gradients be computed, as in a training once a batch; calls within that, as of checkpoints, are none."""
        thread = threading.get_ident()
        if thread in self._in_backward:
            return backward(*args, **options)
        self.n_backward[thread] += 1
        self._trains(is_step=False)
        self._in_backward.add(thread)
        try:
            return backward(*args, **options)
        finally:
            self._in_backward.discard(thread)

    def _trains(self, *, is_step: bool) -> None:
        """A training does what it does once a batch: with one of a loader that is known, or in a loop over others."""
        thread = threading.get_ident()
        since = self._since_given.get(thread, _MOST_OF_A_BATCH) + 1
        self._since_given[thread] = since
        if since <= _MOST_OF_A_BATCH:
            return
        with suppress(Exception):  # the training goes on, whatever its code looks like
            self.loop.stepped(is_step=is_step)
            if self.loop.thread == thread:
                self._start_sampling()
                if making.lines.looks.get(self.loop.look) != thread:
                    making.lines.look_at(thread, self.loop.look)
                    self._undo.callback(making.lines.look_no_more, self.loop.look)
        if self.loop.thread == thread:
            self.control.looped(self.loop)

    def made_here(self, made: BatchTiming, samples: Noted) -> None:
        """This process has made a batch for whoever waits for it."""
        if (epoch := asking.epoch) is not None:
            if len(epoch.made_here) < MOST_NOTED:
                epoch.made_here.append(made)
            if self._n_sample_bytes < MOST_SAMPLE_BYTES:
                self._n_sample_bytes += len(samples)
                epoch.samples.append(samples)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """`torch.save` runs within this block."""
        self.control.saving(self.loaders)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.saves.append((began_s, time.perf_counter(), threading.get_ident()))

    def pins(self, pin: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Let a batch be pinned; the parts of one are pinned by further calls within that."""
        if asking.pins:
            return pin(*args, **options)
        began_s, asking.pins = time.perf_counter(), True
        try:
            return pin(*args, **options)
        finally:
            asking.pins = False
            if (seen := self._pins_for()) is not None:
                seen.pinned_s, seen.n_pinned = seen.pinned_s + time.perf_counter() - began_s, seen.n_pinned + 1

    def seen(self, loader: Any) -> SeenLoader | None:
        """What was noted of a loader, or of what stands for it."""
        return self._seen.get(loader)

    def noted(self, start: Callable[[], Iterator[Any]], loader: Any, stands_for_it: Any = None) -> Iterator[Any]:
        """The batches of an epoch that starts now, noted as those of a loader; no hook need know that."""
        seen, epoch = self._begin(loader, stands_for_it)
        return _Noted(start(), lambda give: self._give(seen, epoch, give, None))

    # The rest.

    def _begin(self, loader: Any, stands_for_it: Any = None) -> tuple[SeenLoader, Epoch]:
        known = loader if stands_for_it is None else stands_for_it
        epoch = Epoch(time.perf_counter(), threading.get_ident(), key=_key_of(known), device_began=self.device.mark())
        seen = self._seen.get(known)
        if seen is None:
            with self._lock:
                kind, traits, data = type(loader).__name__, _traits(loader), getattr(loader, "dataset", None)
                sampler = type(getattr(loader, "sampler", None))
                described = kind, traits, type(data), sampler, _has_gradients(), _lines_asking(sys._getframe())
                seen = self._succeeded(described, data)
                if seen is None:
                    seen = SeenLoader(len(self.loaders), kind, traits)
                    self.loaders.append(seen)
                self._alike[described] = seen, ref(known), id(data)
                seen.name_of = names_of(data)
                seen.places = data_places(loader, seen.name_of(0))
                self._forget_names()
            self._seen.put(known, seen)
        seen.epochs.append(epoch)
        with suppress(Exception):  # such as of a container that lets no more threads start
            self._start_sampling()
            if self.stalls is not None and not self.stalls.runs:
                folder = self.folder()
                self._undo.callback(self.stalls.start(folder and os.path.join(folder, "stacks")))
        return seen, epoch

    def _succeeded(self, described: Any, data: Any) -> SeenLoader | None:
        """The loader whose place a new one takes, as where each epoch makes its own; None: there is none.

        It was made alike and begun by the same lines, and is gone, or has ended and loads the same data.
        """
        seen, there, data_id = self._alike.get(described, (None, None, 0))
        if seen is None or there is None:
            return None
        is_same = id(data) == data_id and data is not None and seen.epochs[-1].ended_s is not None
        return seen if there() is None or is_same else None

    def _began_before(self, iterator: Any) -> tuple[SeenLoader, Epoch]:
        """torch's iterator that was begun before it was observed: its batches are noted, its workers note nothing."""
        data = getattr(iterator, "_dataset", None)
        seen, _ = found = self._begin(SimpleNamespace(dataset=data), iterator)
        seen.kind, n_workers = "DataLoader", getattr(iterator, "_num_workers", None)
        seen.traits = replace(
            seen.traits, num_workers=n_workers, prefetch_factor=getattr(iterator, "_prefetch_factor", None),
            pin_memory=bool(getattr(iterator, "_pin_memory", False)),
        )  # fmt: skip
        self.failed.append(
            f"DataLoader {seen.number} was begun before it was observed: what came before is in no figure"
            + (", and how its workers make batches is not known." if n_workers else ".")
        )
        self._epochs.put(iterator, found)
        return found

    def _forget_names(self) -> None:
        """Those of old loaders, whose data sets may be long gone: all but the last few, and the last that trained."""
        trained = [loader for loader in self.loaders if loader.trains]
        for loader in self.loaders[:-_NAMED]:
            if loader not in trained[-1:]:
                loader.name_of = str

    def _start_sampling(self) -> None:
        if not self.resources.runs:
            self.resources.begin()
            self._undo.callback(self.resources.stop)
        if LineSampler.is_allowed and not making.lines.runs:
            making.lines.start()
            self._undo.callback(making.lines.stop)

    def _does(self, what: str, seen: SeenLoader, epoch: Epoch, worker: int | None, iterator: Any) -> None:
        """What a stall would be a stall of; a new object each time."""
        if self.stalls is not None:
            self.doing = Doing(what, seen, len(epoch.batches), worker, None if iterator is None else ref(iterator))

    def folder(self) -> str | None:
        """A new folder for what other processes note, until `stop`; None where none can be made."""
        from labkit.util.files import ScratchFolder

        chosen = tempfile.tempdir  # None until it is asked for: the script may yet set TMPDIR
        try:
            if self._scratch is None:
                self._scratch = str(self._undo.enter_context(ScratchFolder(tempfile.gettempdir())))
            return tempfile.mkdtemp(dir=self._scratch)
        except OSError:
            return None
        finally:
            tempfile.tempdir = chosen

    def _pins_for(self) -> SeenLoader | None:
        """The loader whose batch this thread pins: the thread is its iterator's, or waits for the batch."""
        if (seen := self._pinning_for.get(threading.current_thread())) is not None:
            return seen
        return next((each for each in self.loaders if any(of is asking.epoch for of in each.epochs[-1:])), None)

    def _give(self, seen: SeenLoader, epoch: Epoch, give: Callable[[], Any], iterator: Any) -> Any:
        seen.has_gradients = seen.has_gradients or _has_gradients()
        give = self.control.next(seen, give)
        worker, ready = _next_worker(iterator), _ready(iterator)
        outer, asking.epoch, asking.loaded_s = asking.epoch, epoch, 0.0
        idle = self.device.asked()
        self._does("waits", seen, epoch, worker, iterator)
        lines = making.lines
        lines.end(is_left=not epoch.loop)  # the first batch of an epoch ends no step
        lines.loader = epoch.key
        queued_asked_s, asked_s, cpu_asked_s = run_queue_s(), time.perf_counter(), time.process_time()
        try:
            data = give()
        except StopIteration:
            epoch.ended_s, epoch.device_ended, self.doing = asked_s, self.device.mark(), None
            self._since_given.pop(threading.get_ident(), None)
            self.control.ended(seen)
            raise
        finally:
            received_s, cpu_s = time.perf_counter(), time.process_time()
            asking.epoch = outer
        phase, thread = self.control.phase, threading.get_ident()
        self.control.received(seen, data)
        self.device.received(idle)
        self.resources.look(received_s)
        queued_s = run_queue_s()
        if not epoch.loop:  # the first batch, which is in no figure
            epoch.loop = calls_asking(sys._getframe())
            if len(seen.epochs) <= _LOOKS:
                seen.batch = look_at(data)
        if self._n_noted < _MOST_IN_ALL and len(epoch.batches) < MOST_NOTED:
            self._n_noted += 1
            own = worker, ready, self.n_steps[thread], cpu_asked_s, cpu_s, asking.loaded_s, phase
            queued = queued_asked_s, queued_s, self.n_backward[thread]
            epoch.batches.append(Batch(asked_s, received_s, *own, *queued))
        self._since_given[thread] = 0
        self._does("steps", seen, epoch, worker, iterator)
        lines.loader, lines.loop = epoch.key, epoch.loop
        lines.begin(STEP)
        return data


_keys, _free_keys = Known(), count()


def _key_of(loader: Any) -> int:
    """The loader's own number in this process: one record may run within another, and each counts for itself."""
    if (key := _keys.get(loader)) is None:
        _keys.put(loader, key := next(_free_keys))
    return key


def _lines_asking(frame: Any) -> tuple[tuple[CodeType, int], ...]:
    """The calls that a frame is in, with the lines that they are at."""
    found = list[tuple[CodeType, int]]()
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _has_gradients() -> bool:
    """Whether torch computes gradients here, as it does in a training and seldom in a validation."""
    return "torch" in sys.modules and sys.modules["torch"].is_grad_enabled()


def _traits(loader: Any) -> LoaderTraits:
    try:
        return LoaderTraits.of(loader)
    except Exception:  # it asks the script's own data sets and samplers, which need not answer
        return LoaderTraits()


class _Noted:
    """An iterator whose every batch is asked for through `note`; it closes as the loader's own does."""

    def __init__(self, batches: Iterator[Any], note: Callable[[Callable[[], Any]], Any]):
        self._batches, self._note = batches, note

    def __iter__(self) -> "_Noted":
        return self

    def __next__(self) -> Any:
        return self._note(self._batches.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _next_worker(iterator: Any) -> int | None:
    """The worker that makes the batch which is next in order; -1: none, this process makes it."""
    if not getattr(iterator, "_num_workers", 0):
        return -1
    with suppress(AttributeError, LookupError, TypeError):  # another torch, or the end
        return iterator._task_info[iterator._rcvd_idx][0]
    return None


def _ready(iterator: Any) -> int | None:
    """Batches that workers have ready, in the queue or set aside because an earlier one is missing."""
    if not getattr(iterator, "_num_workers", 0):
        return None
    with suppress(AttributeError, OSError, RuntimeError):  # another torch, or the end
        return iterator._data_queue.qsize() + sum(len(info) == 2 for info in list(iterator._task_info.values()))
    return None
