"""States of `read_shards`: found in what a loader saved, checked, and joined to what is left of an epoch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from labkit.data.shards.orders import Orders
from labkit.data.shards.place import Place
from labkit.data.shards.progress import Progress
from labkit.data.shards.streams import Stream, part_of

VERSION = 2  # of the state; raised when its meaning changes
_NUMBERS = ("version", "epoch", "start", "order_crc32")
_LISTS = ("place", "began_with", "streams")
_REMEDY = (
    "give load_state_dict() what StatefulDataLoader.state_dict() returned, or a list of the states of all workers; "
    "after a change of ranks, a list of those of all ranks"
)


def state_of(progress: Progress, place: Place, order_crc32: int, *, is_set: bool) -> dict[str, Any]:
    """Plain data for a checkpoint; `is_set` says whether `set_epoch` decides on the epoch."""
    return {
        "version": VERSION,
        "epoch": progress.epoch,
        "start": progress.start,
        "place": list(place),
        "began_with": [progress.world_size, progress.num_workers],
        "streams": [list(stream) for stream in progress.streams],
        "order_crc32": order_crc32,
        "is_set": is_set,
    }


@dataclass(frozen=True)
class Saved:
    """What the states of some readers say: how far each had come in the same epoch, and whether that was set."""

    readers: dict[Place, Progress]
    is_set: bool

    @property
    def epoch(self) -> int:
        return self._any.epoch

    @property
    def _any(self) -> Progress:
        return next(iter(self.readers.values()))

    def resume(self, here: Place, orders: Orders) -> Progress:
        """What a reader has to do now: the rest of its own, or its part of what others have left.

        Raises:
            ValueError: the states of some ranks or workers are missing; names them.
        """
        begun = self._any
        if here in self.readers:
            return self._with(self.readers[here].streams)
        if not any(progress.streams for progress in self.readers.values()):  # the epoch is over
            return self._with([])
        if all(self._is_untouched(place, orders.whole(place)) for place in self.readers):
            self._require({place.rank for place in self.readers}, here)
            return Progress(begun.epoch, begun.start, here.world_size, here.num_workers, orders.whole(here))
        return self._with(self._share_of(here, orders))

    def _share_of(self, here: Place, orders: Orders) -> list[Stream]:
        world_size = next(iter(self.readers)).world_size
        has_same_ranks = world_size == here.world_size
        ranks = {here.rank} if has_same_ranks else set(range(world_size))
        self._require(ranks, here)
        places = [place for place in sorted(self.readers) if place.rank in ranks]
        left = [self._bounded(stream, orders) for place in places for stream in self.readers[place].streams]
        here = here._replace(rank=0, world_size=1) if has_same_ranks else here  # each goes on with its own
        return part_of(left, here, is_equal=orders.samples_per_rank is not None)

    def _bounded(self, stream: Stream, orders: Orders) -> Stream:
        """The stream, with how many are left if it goes to the order's end."""
        begun = self._any
        if stream.n_left is not None:
            return stream
        return stream._replace(n_left=orders.count(begun.place_of(stream), begun.epoch, begun.start) - stream.first)

    def _with(self, streams: list[Stream]) -> Progress:
        begun = self._any
        return Progress(begun.epoch, begun.start, begun.world_size, begun.num_workers, list(streams))

    def _is_untouched(self, place: Place, whole: list[Stream]) -> bool:
        progress = self.readers[place]
        began_with = progress.world_size, progress.num_workers
        return began_with == (place.world_size, place.num_workers) and progress.streams == whole

    def _require(self, ranks: Iterable[int], here: Place) -> None:
        """Refuse states that lack a worker of these ranks."""
        _, world_size, _, num_workers = next(iter(self.readers))
        readers = product(sorted(ranks), range(num_workers))
        needed = [Place(rank, world_size, worker, num_workers) for rank, worker in readers]
        if missing := [str(place) for place in needed if place not in self.readers]:
            whose = "all workers of its rank" if here.world_size == world_size else "all ranks and workers"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"the state was taken in the middle of an epoch by {next(iter(self.readers))}, and this is {here}: it "
                f"goes on with the states of {whose}, and there is none of {missing[0]}{more}; {_REMEDY}"
            )


def read_states(state: Any, order_crc32: int) -> Saved:
    """The states in what a caller gives, checked.

    Args:
        state: A state of `ShardDataset`, one of torchdata's `StatefulDataLoader`, or a list of such.
        order_crc32: That of the data set that goes on.

    Raises:
        ValueError: there is none in it, or one of other shards or settings, or they are not of one moment; says what
            differs.
    """
    readers: dict[Place, Progress] = {}
    is_set = False
    for found in _find_states(state):
        place, progress = _read_state(found, order_crc32)
        is_set |= bool(found.get("is_set"))  # which older states do not say
        if place in readers:
            raise ValueError(f"two states are of {place}: {_REMEDY}")
        readers[place] = progress
    if not readers:
        raise ValueError(f"there is no state in {state!r}: {_REMEDY}")
    alike: dict[str, set[Any]] = {
        "epochs": {progress.epoch for progress in readers.values()},
        "beginnings of an epoch": {progress.start for progress in readers.values()},
        "numbers of ranks and workers": {(place.world_size, place.num_workers) for place in readers},
        "ranks and workers at the epoch's beginning": {
            (progress.world_size, progress.num_workers) for progress in readers.values()
        },
    }
    for what, values in alike.items():
        if len(values) > 1:
            found_values = " and ".join(map(str, sorted(values)))
            raise ValueError(f"the states are not of one moment: they have other {what}, {found_values}; {_REMEDY}")
    return Saved(readers, is_set)


def _find_states(state: Any) -> list[Any]:
    """The states of a data set, in one of torchdata's loader, or in a list."""
    if isinstance(state, list | tuple):
        return [found for part in state for found in _find_states(part)]
    if not isinstance(state, Mapping):
        return [state]
    if "_snapshot" in state:  # of a StatefulDataLoader with workers
        if n_batches := state.get("_steps_since_snapshot"):
            raise ValueError(
                f"the StatefulDataLoader took its snapshot {n_batches} batches ago, and they would come again: make "
                "the loader with snapshot_every_n_steps=1, or load the state into a loader with as many workers"
            )
        return [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
    return [state["dataset_state"]] if "dataset_state" in state else [state]  # without workers


def _read_state(state: Any, order_crc32: int) -> tuple[Place, Progress]:
    remedy = "give the one that state_dict() of the same data set returned"
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}, this labkit reads {VERSION}: begin the epoch anew")
    if not _has_layout(state):
        raise ValueError(f"this is not a state of read_shards, which holds {', '.join(_NUMBERS + _LISTS)}: {remedy}")
    if not _are_numbers(state["place"], 4):
        place = state["place"]
        raise ValueError(f"the place of a state is rank, world size, worker and number of workers, not {place!r}")
    if state["order_crc32"] != order_crc32:
        raise ValueError(
            "the state is of another order of samples: shards, shuffle, shuffle_initial, seed or samples_per_rank "
            f"differ; {remedy}"
        )
    streams = [Stream(*stream) for stream in state["streams"]]
    world_size, num_workers = state["began_with"]
    return Place(*state["place"]), Progress(state["epoch"], state["start"], world_size, num_workers, streams)


def _has_layout(state: Any) -> bool:
    if not isinstance(state, Mapping) or not all(isinstance(state.get(name), int) for name in _NUMBERS):
        return False
    if not all(isinstance(state.get(name), list | tuple) for name in _LISTS):
        return False
    return _are_numbers(state["began_with"], 2) and all(map(_is_stream, state["streams"]))


def _is_stream(values: Any) -> bool:
    if not isinstance(values, list | tuple) or len(values) != 4:
        return False
    return _are_numbers(values if values[3] is not None else [*values[:3], 0], 4)


def _are_numbers(values: Any, count: int) -> bool:
    return len(values) == count and all(isinstance(value, int) for value in values)
