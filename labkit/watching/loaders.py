"""What is known of a training's loaders: their settings, what was noted of their epochs, and what one batch is.

In come a loader and its data set, which say of themselves what they are: nothing of a sample is read. One batch of each
is looked at. Out go `LoaderTraits` and `BatchFacts`; and `SeenLoader`, `Epoch` and `Batch`, which `Record` fills with
when each batch was asked for and when it came.

This runs in the training process: only the standard library and torch are imported.
"""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

from labkit.measure.unchanged import WRAPPED
from labkit.util.tensor_trees import iter_tensors
from labkit.watching.device import DeviceMark
from labkit.watching.worker import BatchTiming, Noted

_MOST_WRAPPED = 20  # data sets: one may give itself for whatever attribute it is asked for


@dataclass(frozen=True)
class LoaderTraits:
    """A loader's settings.

    num_workers: Worker processes; None if it is no `torch.utils.data.DataLoader` and wraps none.
    starts_workers: Whether it starts them again for every epoch.
    prefetch_factor: Batches that each worker makes ahead.
    pin_memory: Whether batches are put into pinned memory.
    decoder: The data set's decoder, by name.
    decodes: Whether there is anything to decode: not in a `PixelStore`.
    is_batch_loader: Whether it is `lk.BatchLoader`, which decodes only what a crop needs.
    reads_far: Whether that one reads objects or files over a network, in the threads that decode.
    is_fast: Whether it gives `lk.DepthPairs` that are made without detours already.
    makes_slow_pairs: Whether it gives others.
    n_batches: Batches of an epoch.
    in_order: Whether its batches come in the order in which they were asked for.
    may_reorder: Whether it could give them in another order: torch's own can since 2.6.
    batch_size: Samples of a batch; None if unknown, or if a batch sampler decides.
    """

    num_workers: int | None = None
    starts_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool = False
    decoder: str | None = None
    decodes: bool = True
    is_batch_loader: bool = False
    reads_far: bool = False
    is_fast: bool = False
    makes_slow_pairs: bool = False
    n_batches: int | None = None
    in_order: bool = True
    may_reorder: bool = False
    batch_size: int | None = None

    @classmethod
    def of(cls, loader: Any) -> "LoaderTraits":
        """The traits of a loader, or of the one that it wraps."""
        workers, decoder = torch_loader(loader), of_data_set(loader, "decoder")
        return cls(
            num_workers=getattr(workers, "num_workers", None), starts_workers=starts_workers(workers),
            prefetch_factor=getattr(workers, "prefetch_factor", None),
            pin_memory=bool(getattr(workers, "pin_memory", False)),
            decoder=decoder if isinstance(decoder, str) else None,
            decodes=not any(_is_labkits(data, "PixelStore") for data in [*_data_sets(loader), source_of(loader)]),
            is_batch_loader=_is_labkits(loader, "BatchLoader"),
            reads_far=any(_is_labkits(source_of(loader), name) for name in ("HttpStore", "ObjectStore")),
            is_fast=any(_is_labkits(data, "DepthPairs") and data.fast for data in _data_sets(loader)),
            makes_slow_pairs=any(_is_labkits(data, "DepthPairs") and not data.fast for data in _data_sets(loader)),
            n_batches=_epoch_length(loader), batch_size=_batch_size(loader, workers),
            in_order=bool(getattr(workers, "in_order", True)), may_reorder=hasattr(workers, "in_order"),
        )  # fmt: skip


def _batch_size(*loaders: Any) -> int | None:
    return next((size for each in loaders if isinstance(size := getattr(each, "batch_size", None), int)), None)


def of_data_set(loader: Any, name: str) -> Any:
    """An attribute of the loader's data set, or of one that it wraps; None if none has it."""
    found = (getattr(data, name, None) for data in _data_sets(loader))
    return next((value for value in found if value is not None), None)


def _data_sets(loader: Any) -> Iterator[Any]:
    """The loader's data set, and those that it wraps."""
    data = getattr(loader, "dataset", None)
    for _ in range(_MOST_WRAPPED):
        if data is None:
            return
        yield data
        data = getattr(data, "dataset", None)


def source_of(loader: Any) -> Any:
    """What a `BatchLoader` reads; None for other loaders."""
    return getattr(loader, "source", None) if _is_labkits(loader, "BatchLoader") else None


def _is_labkits(value: Any, name: str) -> bool:
    """Whether it is of that class of labkit's, which is not imported here: NumPy and Pillow would come with it."""
    return any(kind.__name__ == name and kind.__module__.startswith("labkit.") for kind in type(value).__mro__)


def torch_loader(loader: Any) -> Any:
    """The `torch.utils.data.DataLoader` that a loader is, or wraps like timm's and labkit's prefetchers; or None."""
    from torch.utils.data import DataLoader

    for _ in range(4):
        if loader is None or isinstance(loader, DataLoader):
            return loader
        attributes = getattr(loader, "__dict__", {})
        loader = next((attributes[name] for name in WRAPPED if name in attributes), None)
    return None


def _epoch_length(loader: Any) -> int | None:
    """Batches of an epoch, where the loader says so without harm."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # once asked for it, torch warns if more batches come
    try:
        return len(loader)
    except TypeError:
        return None


def starts_workers(loader: Any) -> bool:
    """Whether torch's loader starts its workers again for every epoch."""
    return loader is not None and loader.num_workers > 0 and not loader.persistent_workers


def names_of(data: Any) -> Callable[[Any], str]:
    """The file or key of a sample by its index, if its data set has a list of them, else `sample 17`.

    Nothing of a sample is read, and of the data set its lists and columns alone are kept.
    """
    name = lambda index: ""  # noqa: E731
    with suppress(Exception):  # a data set of the script need not answer
        name = _named(data)

    def told(index: Any) -> str:
        with suppress(Exception):
            index = int(index)
            return name(index) or f"sample {index}"
        return f"sample {index}"

    return told


def _named(data: Any) -> Callable[[Any], str]:
    is_torchs = type(data).__module__ == "torch.utils.data.dataset"
    if is_torchs and hasattr(data, "indices"):  # Subset
        indices, inner = data.indices, _named(data.dataset)
        return lambda index: inner(indices[index])
    if is_torchs and hasattr(data, "cumulative_sizes"):  # ConcatDataset
        ends, parts = data.cumulative_sizes, [*map(_named, data.datasets)]

        def of_part(index: int) -> str:
            part = bisect_right(ends, index)
            return parts[part](index - (ends[part - 1] if part else 0))

        return of_part
    with suppress(TypeError):  # without a length: a wrapper
        n_samples, root = len(data), getattr(getattr(data, "store", None), "root", "")
        for values in map(_list_in, vars(data).values()):
            if values is not None and len(values) == n_samples > 0 and _text_of(values[0]):
                return lambda index: os.path.join(root, _text_of(values[index]))
    return _named(data.dataset) if hasattr(data, "dataset") else lambda index: ""


def _list_in(values: Any) -> Any:
    """What may be the list of names: a list, or of a table of pandas the first column whose texts differ."""
    if type(values).__module__.partition(".")[0] == "pandas":
        columns = [values[name] for name in values.columns] if hasattr(values, "columns") else [values]
        return next((one.array for one in columns if len(one) and _text_of(one.iloc[0]) and one.is_unique), None)
    return values if _has_its_items(values) else None


def _has_its_items(values: Any) -> bool:
    """Whether it is a list or a tuple whose items are there: a subclass may read a file for each."""
    return isinstance(values, list | tuple) and type(values).__getitem__ in (list.__getitem__, tuple.__getitem__)


def _text_of(value: Any) -> str:
    """A name in a list: itself, or the first of several, as in torchvision's (path, class)."""
    value = value[0] if _has_its_items(value) and value else value
    return os.fspath(value) if isinstance(value, str | os.PathLike) else ""


# What a batch is.

_SMALL_BYTES = 64_000  # a tensor's own costs weigh more than its bytes
_MANY = 16  # such tensors in a batch
_LEAST_PIXELS = 8  # of a side of an image
_N_VALUES = 4096  # of a channel that are looked at
_BYTE_VALUES = 256
_MAIN_SHARE = 0.99  # of the bytes: the rest is not worth a word


@dataclass(frozen=True)
class BatchFacts:
    """One batch of a loader.

    n_bytes: Of all its tensors; `dtypes` has those of each type, by name.
    n_bytes_as_uint8: The same if the float32 images whose values fit bytes were uint8.
    n_small: Tensors of fewer than 64 kB.
    n_strided: Tensors with gaps between their elements, which are made contiguous before they are copied to a device.
    n_on_host: Tensors in host memory.
    n_pinned: Of them in pinned memory; None where CUDA is not in use.
    pin_s: Seconds that torch took to pin a batch, on average; None if it pinned none.
    """

    n_tensors: int
    n_bytes: int
    dtypes: dict[str, int]
    n_bytes_as_uint8: int
    n_small: int
    n_strided: int
    n_on_host: int
    n_pinned: int | None
    pin_s: float | None = None

    def sentences(self, *, is_dear: bool, pin_share: float, has_workers: bool, pins: bool) -> Iterator[str]:
        """The batch in words, and what to change of it.

        Args:
            is_dear: Whether handing over, pinning or copying takes a share of the time that is worth a change.
            pin_share: What pinning took, as a share of the time of a batch.
            has_workers: Whether it comes from another process.
            pins: Whether the loader is to pin it.
        """
        yield f"A batch is {self._amount}{self._as_bytes(is_dear)}{self._pinning(pin_share, has_workers)}."
        if self.n_small >= _MANY and is_dear and (has_workers or pins):
            costs = " and ".join(["sent from its worker"] * has_workers + ["pinned"] * pins)
            yield (
                f"{self.n_small} of its tensors are smaller than {_size(_SMALL_BYTES)}, and each is {costs} on its "
                "own: stack them in collate_fn."
            )
        if self.n_strided and is_dear:
            few = "1 tensor of a batch has" if self.n_strided == 1 else f"{self.n_strided} tensors of a batch have"
            yield f"{few} gaps between elements: .contiguous() in collate_fn saves a copy."
        if pins and self.n_pinned is not None and self.n_pinned < self.n_on_host:
            yield (
                f"pin_memory=True pins {self.n_pinned} of the {self.n_on_host} tensors of a batch: torch looks for "
                "them in dicts, lists and tuples; a class of your own needs a method pin_memory()."
            )

    @property
    def _amount(self) -> str:
        tensors = "1 tensor" if self.n_tensors == 1 else f"{self.n_tensors} tensors"
        if not self.n_bytes:
            return tensors
        by_size = sorted(self.dtypes.items(), key=lambda item: -item[1])
        if by_size[0][1] >= _MAIN_SHARE * self.n_bytes:
            return f"{tensors}, {_size(self.n_bytes)} of {by_size[0][0]}"
        return f"{tensors}, {_size(self.n_bytes)}: {', '.join(f'{name} {_size(each)}' for name, each in by_size[:3])}"

    def _as_bytes(self, is_dear: bool) -> str:
        if self.n_bytes_as_uint8 == self.n_bytes:
            return ""
        said = f"; its images have the values of bytes, and as uint8 it would be {_size(self.n_bytes_as_uint8)}"
        return f"{said}: convert and normalize where the step runs" if is_dear else said

    def _pinning(self, share: float, has_workers: bool) -> str:
        if self.pin_s is None:
            return "; it is not pinned" if self.n_pinned == 0 and self.n_on_host else ""
        where = ", in a thread beside the step" if has_workers else ""
        return f"; pinning it takes {rounded(1e3 * self.pin_s)} ms{where}, {share:.0%} of the time of a batch"


def look_at(batch: Any) -> BatchFacts | None:
    """The facts of a batch, of any nest of tensors that `labkit.util.tensor_trees` knows; None if it cannot be read.

    >>> look_at({"image": torch.zeros(8, 3, 224, 224), "label": torch.zeros(8)}).n_tensors  # doctest: +SKIP
    2
    """
    with suppress(Exception):  # the script's own classes need not let themselves be looked at
        tensors = list(iter_tensors(batch))
        n_bytes, dtypes = [tensor.numel() * tensor.element_size() for tensor in tensors], Counter[str]()
        for tensor, each in zip(tensors, n_bytes, strict=True):
            dtypes[str(tensor.dtype).removeprefix("torch.")] += each
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        saved = sum(each - each // 4 for tensor, each in zip(tensors, n_bytes, strict=True) if _fits_bytes(tensor))
        return BatchFacts(
            n_tensors=len(tensors), n_bytes=sum(n_bytes), dtypes=dict(dtypes), n_bytes_as_uint8=sum(n_bytes) - saved,
            n_small=sum(each < _SMALL_BYTES for each in n_bytes), n_strided=sum(map(_has_gaps, tensors)),
            n_on_host=len(on_host), n_pinned=_n_pinned(on_host),
        )  # fmt: skip
    return None


def _n_pinned(tensors: list[Any]) -> int | None:
    import torch  # whoever has tensors has imported it

    if not torch.cuda.is_initialized():  # asking would initialize it
        return None
    return sum(tensor.is_pinned() for tensor in tensors)


def _has_gaps(tensor: Any) -> bool:
    """Whether its elements, in whatever order, do not fill the memory from the first to the last."""
    with suppress(RuntimeError, NotImplementedError, AttributeError):  # sparse, nested
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return bool(tensor.numel() > 0 and span > tensor.numel())
    return False


def _fits_bytes(tensor: Any) -> bool:
    """Whether it is an image, or several, in float32 and with so few values that they were bytes: a photo, a mask.

    A map of depths, or a photo that was mixed or resized as floats, has more.
    """
    if (
        str(tensor.dtype) != "torch.float32"
        or tensor.device.type != "cpu"
        or tensor.dim() not in (3, 4)
        or not len(tensor)
    ):
        return False
    image = tensor.detach() if tensor.dim() == 3 else tensor.detach()[0]
    if min(sorted(image.shape)[1:], default=0) < _LEAST_PIXELS:
        return False
    channel = image[0] if image.shape[0] in (1, 3) else image[..., 0] if image.shape[-1] in (1, 3) else None
    if channel is None or channel.numel() <= _BYTE_VALUES:
        return False
    values = channel.reshape(-1)[:: -(-channel.numel() // _N_VALUES)]
    return len(set(values.tolist())) <= _BYTE_VALUES < len(values)


def rounded(value: float) -> str:
    """Three digits, or more before the point: 0.00123, 12.3, 1,234."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _size(n_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


# What is noted.

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

    @property
    def span(self) -> tuple[float, float]:
        """When it began and ended, or got its last batch so far; of one that has batches."""
        return self.began_s, self.ended_s or self.batches[-1].received_s


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
