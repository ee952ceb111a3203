"""One timed run of a loader, in its host.

`compare` lengthens an epoch only where a loader's sampler is known. Here each loader starts every epoch from the
beginning, with an empty queue: the first quarter of an epoch's images, and at least a batch of each worker, lets it
settle, and the rest is timed. So no loader gains by beginning its next epoch early, or by batches that were ready
beforehand. A host imports this module and its loader's, and no more: there are many of them.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from labkit.data.stores import FolderStore
from labkit.measure.usage import CoreTime
from labkit.peers.peer import Peer, Work

_SETTLING_SHARE = 1 / 4
_MIN_BATCHES = 4  # of an epoch: fewer have no steady state, and the whole run counts
_MAX_SHARE = 4  # a run lasts at most about this many times `Work.min_steady_s`, unless one epoch takes longer

# Epochs of a run, by loader, as its first run plans them: not from its first epoch, in which it may compile or start
# workers, but from a second one. If each run ended when its own clock said so, slow ones would be cut short, and the
# mean rate would be too low.
_n_epochs: dict[str, int] = {}


class PeerRun:
    """A run in progress: `start`, then `take_first`, then `take_rest`.

    Args:
        peer, work: The loader, and what it does.
        clock: Seconds; for tests.
    """

    def __init__(self, peer: Peer, work: Work, clock: Callable[[], float] = time.perf_counter):
        self._peer, self._work, self._clock = peer, work, clock
        n_photos, one_round = len(FolderStore(work.root).paths()), work.batch_size * max(1, work.num_workers)
        # Whole rounds: workers that begin together deliver together.
        self._n_settling = math.ceil(max(_SETTLING_SHARE * n_photos, one_round) / one_round) * one_round
        self._batches: Iterator[Any] = iter(())
        self.n_images = self.n_steady_batches = self.n_steady_images = 0
        self._whole_s = self._steady_s = 0.0

    def start(self) -> None:
        """Begin an epoch: what a loader does before it waits for its first batch is start-up."""
        self._batches, self._n_before = iter(self._peer.loader(self._work)), self.n_images

    def take_first(self) -> int:
        """Wait for the first batch; returns its images, 0 if there is none."""
        begin = self._clock()
        self._take()
        self._whole_s += self._clock() - begin
        return self.n_images

    def take_rest(self) -> None:
        """Read to the end of the epoch, and of as many more as the loader's first run plans by its second epoch."""
        begin = self._clock()
        self._finish_epoch()
        if self._peer.name in _n_epochs:
            for _ in range(_n_epochs[self._peer.name] - 1):
                self.start()
                self._finish_epoch()
        else:
            second, steady_before_s = self._clock(), self._steady_s
            self.start()
            self._finish_epoch()
            seconds = max(self._steady_s - steady_before_s, (self._clock() - second) / _MAX_SHARE, 1e-6)
            _n_epochs[self._peer.name] = max(1, math.ceil(self._work.min_steady_s / seconds))
        self._whole_s += self._clock() - begin

    def columns(self, cpu_s: float, cores: CoreTime) -> dict[str, Any]:
        """What `compare` takes as the run's figures. The arguments are of the whole run, the loader's and all cores'.

        Of them the steady states get their share of the images: reading them at each border would let queues fill.
        """
        is_steady = self.n_steady_images > 0
        n_images, seconds = (self.n_steady_images, self._steady_s) if is_steady else (self.n_images, self._whole_s)
        share = n_images / self.n_images
        return {
            "images_per_s": n_images / seconds if seconds > 0 else float("inf"),
            "steady_s": self._steady_s,
            "n_steady_batches": self.n_steady_batches,
            "n_steady_images": self.n_steady_images,
            "is_steady": is_steady,
            "cpu_s": cpu_s * share,
            "steal_s": cores.stolen_s * share,
            "others_cpu_s": max(0.0, cores.busy_s - cpu_s) * share,
        }

    def _finish_epoch(self) -> None:
        while self.n_images - self._n_before < self._n_settling and self._take():
            pass
        begin, n_before, n_batches = self._clock(), self.n_images, 0
        while self._take():
            n_batches, end = n_batches + 1, self._clock()  # what follows the last batch is the end of the workers
        if n_batches >= _MIN_BATCHES:
            self._steady_s += end - begin
            self.n_steady_batches += n_batches
            self.n_steady_images += self.n_images - n_before

    def _take(self) -> bool:
        from labkit.measure.steady import count_images, synchronize

        batch = next(self._batches, None)
        if batch is not None:
            synchronize()
            self.n_images += count_images(batch)
        return batch is not None
