"""How far a data set of shards has come, and its state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

VERSION = 1  # of the state; raised when its meaning changes
_NUMBERS = ("version", "epoch", "start", "n_read", "n_given", "is_over", "order_crc32")


class Clock:
    """The number of the epoch, and where its samples begin in the endless row of passes. Workers share it.

    An epoch of `n_samples` over all ranks begins where the one before it ended. After a resume with another number
    of ranks, epochs have another length from there on.
    """

    def __init__(self) -> None:
        self._numbers = torch.zeros(3, dtype=torch.int64).share_memory_()  # epoch; an epoch and where that one began

    @property
    def epoch(self) -> int:
        return int(self._numbers[0])

    def set_epoch(self, epoch: int) -> None:
        self._numbers[0] = epoch

    def start(self, n_samples: int) -> int:
        """Where this epoch begins, if each has `n_samples`."""
        epoch, known_epoch, known_start = self._numbers.tolist()
        return known_start + (epoch - known_epoch) * n_samples

    def resume(self, epoch: int, known_epoch: int, known_start: int) -> None:
        """Go on with `epoch`; `known_epoch` begins at `known_start`."""
        self._numbers.copy_(torch.tensor([epoch, known_epoch, known_start]))


@dataclass
class Progress:
    """How far the newest iterator of a data set has come, for its state.

    Attributes:
        epoch: The epoch that it reads.
        n_read: Samples of its order that are done, skipped ones among them.
        n_given: Samples that it gave.
        is_over: Whether it gave the last.
    """

    epoch: int
    n_read: int = 0
    n_given: int = 0
    is_over: bool = False


def read_state(state: Any, order_crc32: int) -> Mapping[str, Any]:
    """A state of `ShardDataset`, checked.

    Raises:
        ValueError: it is none, or of other shards or settings; says what differs.
    """
    remedy = "give the one that state_dict() of the same data set returned"
    if not isinstance(state, Mapping) or not all(isinstance(state.get(name), int) for name in _NUMBERS):
        raise ValueError(f"this is not a state of read_shards, which holds {', '.join(_NUMBERS)} and place: {remedy}")
    place = state.get("place")
    if not isinstance(place, list | tuple) or not all(isinstance(number, int) for number in place) or len(place) != 4:
        raise ValueError(f"the place of a state is rank, world size, worker and number of workers, not {place!r}")
    if state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}, this labkit reads {VERSION}: begin the epoch anew")
    if state["order_crc32"] != order_crc32:
        raise ValueError(
            "the state is of another order of samples: shards, shuffle, shuffle_initial, seed or samples_per_rank "
            f"differ; {remedy}"
        )
    return state
