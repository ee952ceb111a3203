"""What is noted of a training: its loaders, their epochs, and of each batch when it was asked for and when it came."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

from labkit.watching.batches import BatchFacts
from labkit.watching.device import DeviceMark
from labkit.watching.traits import LoaderTraits
from labkit.watching.worker import BatchTiming, Noted

REPLAY = "replay"  # the phase in which batches are repeated from memory
FEW = 20  # batches: with fewer the figures are rough
MOST_NOTED = 50_000  # batches of an epoch, in about 10 MB


class Batch(NamedTuple):
    """One batch that a training asked for; times by `time.perf_counter()`.

    worker: Which worker made it; None if unknown, -1: this process.
    ready: Batches that were ready when it was asked for; None if unknown.
    n_steps, n_backward: Steps of optimizers, and calls of `backward`, in its thread so far.
    loaded_s: What unpickling took meanwhile, of this batch or of one that came before its turn, without waiting for
        its worker to answer: one that makes another batch does so late.
    phase: `"training"`, or what else the loop was made to do, such as `REPLAY`.
    cpu_s: Processor seconds of the process so far, when it was asked for and when it was there.
    queued_asked_s, queued_received_s: Seconds that the thread has waited for a core so far, likewise.
    """

    asked_s: float
    received_s: float
    worker: int | None
    ready: int | None
    n_steps: int
    cpu_asked_s: float
    cpu_received_s: float
    loaded_s: float
    phase: str
    queued_asked_s: float = 0.0
    queued_received_s: float = 0.0
    n_backward: int = 0


class Control:
    """Decides what the loaders of an observed training give. This one lets them be."""

    phase = "training"

    def next(self, seen: "SeenLoader", give: Callable[[], Any]) -> Callable[[], Any]:
        """Called before each batch; returns what gives it. `give` makes the loader's own next one."""
        return give

    def received(self, seen: "SeenLoader", data: Any) -> None:
        """Called after each batch, before the training gets it."""

    def ended(self, seen: "SeenLoader") -> None:
        """Called when a loader has no more batches in this epoch."""

    def saving(self, loaders: "list[SeenLoader]") -> None:
        """Called before `torch.save`, with the loaders so far."""

    def looped(self, loop: Any) -> None:
        """Called when a loop whose loader is not known, a `LoopWatch`, has computed gradients again."""


@dataclass
class Epoch:
    """One pass of one iterator; `ended_s` is None while it runs, or if the loop left it early."""

    began_s: float
    thread: int
    batches: list[Batch] = field(default_factory=list)
    ended_s: float | None = None
    made_here: list[BatchTiming] = field(default_factory=list)
    samples: list[Noted] = field(default_factory=list)  # of each batch that was made here
    number: int = 0  # of the epoch of its iterator, as its workers count them
    loop: tuple[CodeType, ...] = ()  # code of the calls that ask for its batches, the outermost first
    key: int = -1  # of its loader, the same for all that observe this process
    device_began: DeviceMark = (0, 0)
    device_ended: DeviceMark | None = None


@dataclass
class SeenLoader:
    """A loader and its epochs.

    number: In the order in which loaders are first iterated, from 0.
    has_gradients: Whether batches were asked for where torch computes gradients, as a validation does not.
    is_sampled: Whether it stands for a loop over what is not known, which is told by samples of where its code stands.
    """

    number: int
    kind: str
    traits: LoaderTraits
    epochs: list[Epoch] = field(default_factory=list)
    name_of: Callable[[Any], str] = str  # of a sample, by its index
    folders: dict[int, str] = field(default_factory=dict)  # of the workers' times, by the epoch that started them
    places: list[str] = field(default_factory=list)  # that its data may lie in
    batch: BatchFacts | None = None
    pinned_s: float = 0.0
    n_pinned: int = 0
    has_gradients: bool = False
    is_sampled: bool = False
    waiting: float = 0.0  # share of the making in which nothing is computed, where it is known of no single batch

    @property
    def folder(self) -> str:
        """Where the workers that were started last note their times."""
        return self.folders[max(self.folders)] if self.folders else ""

    @property
    def trains(self) -> bool:
        """Whether an optimizer stepped, or else gradients were computed, between its batches."""
        return self.steps or self.differentiates

    @property
    def steps(self) -> bool:
        """Whether an optimizer of torch stepped between its batches."""
        return any(epoch.batches[-1].n_steps > epoch.batches[0].n_steps for epoch in self.epochs if epoch.batches)

    @property
    def differentiates(self) -> bool:
        """Whether `backward` was called between them."""
        return any(epoch.batches[-1].n_backward > epoch.batches[0].n_backward for epoch in self.epochs if epoch.batches)

    @property
    def n_batches(self) -> int:
        return sum(len(epoch.batches) for epoch in self.epochs)


class Known:
    """What is noted of objects that are not ours, without a mark on them."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[ref[Any], Any]] = {}

    def get(self, thing: Any) -> Any:
        """What was noted of it; None if nothing was."""
        found = self._of.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def put(self, thing: Any, value: Any) -> None:
        self._of[id(thing)] = (ref(thing), value)
