"""The data set that `read_shards` returns: which samples a process reads, in which order, from any place on."""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset
from webdataset.utils import pytorch_worker_info

from labkit.core import require_choice
from labkit.data.datasets import SkipLog, Skipped
from labkit.data.decoders import DECODERS, DecodeError, decode
from labkit.data.shards.orders import Orders
from labkit.data.shards.place import Place
from labkit.data.shards.progress import Clock, Progress
from labkit.data.shards.sample import find_image, parse_label
from labkit.data.shards.states import Saved, read_states, state_of


class ShardWarning(UserWarning):
    """Some workers or ranks have nothing to read, or ranks may read different epochs."""


@dataclass(eq=False, repr=False)
class ShardDataset(IterableDataset):
    """What `read_shards` returns.

    Attributes:
        urls: The shards.
        classes: Names that labels index into; None without a manifest.

    Nothing of a sample is unpickled or executed: an image is decoded, a label is a number.

    Raises, while iterating:
        TarError: a shard is cut or damaged, or goes on after its end mark; names it and its last whole member. Or a
            member of a sample is a link or a device, or larger than 1024 MB (`LABKIT_MAX_FILE_MB`).
        DecodeError: an image cannot be decoded; names key and shard.
        ValueError: a sample has no image, several, or no label, or a shard is not what its manifest says.

    Warns (once, on stderr, in the first worker):
        ShardWarning: there are fewer shards than workers of all ranks; or each of several ranks counts its own epochs.
    """

    orders: Orders
    decoder: str
    transform: Callable[[Tensor], Any] | None
    on_error: str

    def __post_init__(self) -> None:
        require_choice("decoder", self.decoder, DECODERS)
        require_choice("on_error", self.on_error, ("raise", "skip"))
        self.urls, self.classes = self.orders.shards.urls, self.orders.shards.classes
        self._clock = Clock()
        self._progress: Progress | None = None
        self._saved: Saved | None = None
        self._parent_place: Place | None = None
        self._skips = SkipLog() if self.on_error == "skip" else None
        self._has_warned = False

    @property
    def skipped(self) -> list[Skipped]:
        """Images left out so far, in this process and in every worker."""
        return self._skips.read() if self._skips else []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of shuffled samples, in persistent workers too.

        From then on this decides: call it before each epoch, on every rank. Without it each pass over the data set, or
        over a loader of it, is the next epoch. With several ranks it is needed, as each counts its own passes.

        Raises:
            RuntimeError: accelerate calls it, with several processes: it would share out what is shared out already.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("accelerate.") and (world_size := self._find_place().world_size) > 1:
            raise RuntimeError(
                f"accelerate would give each of {world_size} processes a part of what this one reads, and read_shards "
                "has shared out the samples already: the rest would be lost. Leave this loader out of "
                "accelerator.prepare(), and move its batches by .to(accelerator.device)"
            )
        self._clock.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator of this process stands, as plain data of some 200 bytes.

        Take it between two samples, or let torchdata's `StatefulDataLoader` do so in its workers.
        """
        place, progress, is_set = self._find_place(), self._progress, self._clock.is_set
        epoch = self._clock.epoch(place.rank)
        if progress is None or (is_set and progress.epoch != epoch):
            progress = self._new_progress(place, epoch)
        return state_of(progress, place, self.orders.crc32, is_set=is_set)

    def load_state_dict(self, state: Any) -> None:
        """Let the next iterator go on where `state` was taken. What was given before is not decoded again.

        With the ranks and workers of the state, the rest is that of the undisturbed epoch, in its order. With others,
        they share it out: each sample that is left comes once, and no reader has two more than another. With
        `samples_per_rank`, other ranks get equally many: up to `world_size - 1` samples of the epoch come again.

        torchdata's loader itself goes on with as many workers only. For another number of them, the data set gets the
        loader's state, before the new loader is made::

            dataset = read_shards(urls, shuffle=1000)
            dataset.load_state_dict(state)  # what StatefulDataLoader.state_dict() returned, or a list of such
            loader = StatefulDataLoader(dataset, batch_size=64, num_workers=3)

        Args:
            state: What `state_dict` returned, here or of the `StatefulDataLoader` over this data set, or a list of
                such states. For other workers, that of the loader; for other ranks, those of all ranks, on each rank;
                at an epoch's end, that of any.

        Raises:
            ValueError: the state is of other shards or settings; or in mid-epoch, states are missing, of two moments,
                or older than the last batch (`snapshot_every_n_steps`). Says what differs and what to give.
        """
        saved = read_states(state, self.orders.crc32)
        self._progress = progress = saved.resume(self._find_place(), self.orders)
        next_start = progress.start + self.orders.epoch_length(progress.world_size)
        self._clock.resume(progress.epoch, next_start, is_set=saved.is_set)
        self._saved = saved

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        place = self._find_place()
        saved, self._saved = self._saved, None
        begun = self._clock.begin(place, saved.epoch if saved else None)
        if saved and begun.resumes:
            self._progress = saved.resume(place, self.orders)
        else:
            self._warn_if_idle(place)
            self._progress = self._new_progress(place, begun.epoch)
        if begun.n_counted == 2:
            self._warn_of_ranks(place)
        return self._items(self._progress)

    def samples(self) -> Iterator[dict[str, Any]]:
        """This process' part of an epoch, undecoded: `__key__`, `__url__`, and each member's bytes by its suffix.

        It is that of the epoch that was set, or of the next pass, and does not count as one.
        """
        place = self._find_place()
        self._warn_if_idle(place)
        epoch = self._clock.epoch(place.rank)
        return self.orders.samples(place, epoch, self._start(place, epoch))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not inherit the rank that torch.distributed has.
        return {**self.__dict__, "_parent_place": self._find_place()}

    def _find_place(self) -> Place:
        place = Place(*pytorch_worker_info())
        if place.world_size == 1 and self._parent_place is not None:
            return place._replace(rank=self._parent_place.rank, world_size=self._parent_place.world_size)
        return place

    def _start(self, place: Place, epoch: int) -> int:
        return self._clock.start(epoch, self.orders.epoch_length(place.world_size))

    def _new_progress(self, place: Place, epoch: int) -> Progress:
        start = self._start(place, epoch)
        return Progress(epoch, start, place.world_size, place.num_workers, self.orders.whole(place))

    def _items(self, progress: Progress) -> Iterator[tuple[Any, int]]:
        while progress.streams:
            n_streams, stream = len(progress.streams), progress.streams[0]
            place = progress.place_of(stream)
            share = self.orders.share(place)
            # In a second round, samples of this epoch come again, in place of those that were skipped.
            n_read, n_given = stream.first % (share or sys.maxsize), 0
            for sample in self.orders.samples(place, progress.epoch, progress.start, n_read):
                item = self._decode(sample)
                progress.advance(counts=item is not None or share is None)
                if item is not None:
                    n_given += 1
                    yield item
                if len(progress.streams) < n_streams:
                    break
            else:
                if share is None:
                    del progress.streams[0]
                elif not n_read and not n_given:
                    raise ValueError(f"only 0 of {share} samples could be read: all of them were skipped")

    def _decode(self, sample: dict[str, Any]) -> tuple[Any, int] | None:
        """The sample's image and label; None if it is skipped."""
        name, data = find_image(sample)
        label = parse_label(sample["cls"], name)
        try:
            image = decode(data, self.decoder, key=name)
        except DecodeError as error:
            if self._skips is None:
                raise
            self._skips.add(name, str(error))
            return None
        return (self.transform(image) if self.transform else image), label

    def _warn_if_idle(self, place: Place) -> None:
        n_readers, n_shards = place.world_size * place.num_workers, len(self.urls)
        is_first = place.rank == 0 and place.worker == 0 and not self._has_warned
        if is_first and n_shards < n_readers and self.orders.samples_per_rank is None:
            self._has_warned = True
            warnings.warn(
                f"{n_shards} shards for {place.world_size} ranks x {place.num_workers} workers: "
                f"{n_readers - n_shards} of them have nothing to read. Write smaller shards "
                "(write_shards(..., max_count=...)), or use fewer workers",
                ShardWarning,
                stacklevel=3,
            )

    def _warn_of_ranks(self, place: Place) -> None:
        has_epochs = self.orders.shuffle or self.orders.samples_per_rank
        if has_epochs and place.world_size > 1 and place.rank == 0 and place.worker == 0:
            warnings.warn(
                f"each of {place.world_size} ranks counts its own passes, and after one pass more than the others it "
                "would get their samples: call set_epoch(epoch) of the data set before each epoch, on every rank",
                ShardWarning,
                stacklevel=3,
            )
