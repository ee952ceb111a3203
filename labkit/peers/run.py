"""One timed run of a loader, in its host, with its photos, its collections and the prediction for more cores.

`compare` lengthens an epoch only where a loader's sampler is known. Here each loader starts every epoch from the
beginning, with an empty queue: the first quarter of an epoch's images, and at least a batch of each worker, lets it
settle, and the rest is timed. So no loader gains by beginning its next epoch early, or by batches that were ready
beforehand.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image

from labkit.data.decode import decode
from labkit.data.pixels import shrink
from labkit.data.stores import FolderStore
from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, save_frame
from labkit.measure.plots import COLORS, MARKERS, make_axes, put_legend_below, write_title
from labkit.measure.statistics import format_ratio
from labkit.measure.usage import CoreTime
from labkit.peers.peer import Peer, Work
from labkit.util.files import write_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, name_run, usable_cores
from labkit.util.pictures import encode_image

_QUALITY = 90


def make_small_photos(photos: Path, root: Path, short_side: int) -> Path:
    """Reduce photos once, as most people who store JPEGs do before training.

    Each is written as a JPEG of quality 90, its shorter side at most `short_side` pixels.

    Args:
        photos: Folder of photos in sub-folders.
        root: Where the small ones go, under the same names. Those that are there are kept.

    Returns:
        `root`.

    Raises:
        DecodeError: a photo cannot be decoded; names it.
    """
    store = FolderStore(photos)

    def make_small(key: str) -> None:
        if not (root / key).exists():
            image = Image.fromarray(shrink(decode(store.read(key), key=key), short_side))
            write_atomic(root / key, encode_image(image, "JPEG", quality=_QUALITY))

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(make_small, store.keys()))
    return root


def repeat_photos(photos: Path, root: Path, n_names: int) -> Path:
    """A folder in which each photo has `n_names` names, so that an epoch of a few large photos is a long one.

    The names are links to one and the same bytes. Those that are there are kept.
    """
    for path in FolderStore(photos).paths():
        for number in range(n_names):
            name = root / path.relative_to(photos).with_stem(f"{path.stem}-{number}")
            if not name.exists():
                name.parent.mkdir(parents=True, exist_ok=True)
                name.hardlink_to(path)
    return root


STORED = "13_peers.csv"  # beside the notebook


def append_runs(frame: pd.DataFrame, path: str | os.PathLike) -> pd.DataFrame:
    """Add a comparison to a CSV, which is created if it is not there.

    A run of the same class on the same machine replaces the one before. Runs of other machines stay beside it:
    nothing is compared across machines, since `lk.summarize` refuses that.

    Args:
        frame: Runs of one comparison, as `compare_peers` returns them.
        path: The CSV.

    Returns:
        The whole collection, with the columns `run`, which names each comparison, and `measure`, the version of what
        its figures mean.

    Raises:
        ValueError: the file holds something else, or figures of another meaning; names it and the remedy.
    """
    added = frame.assign(run=name_run(), measure=MEASURE_VERSION)
    if Path(path).exists():
        stored, (machine, name) = read_collection(path), added[["env_id", "peer_class"]].iloc[0]
        others = stored[(stored["env_id"] != machine) | (stored["peer_class"] != name)]
        added = pd.concat([others, added], ignore_index=True)
    save_frame(added, Path(path))
    return added


def read_collection(path: str | os.PathLike) -> pd.DataFrame:
    """Read a collection; errors as for `append_runs`."""
    stored = load_frame(path)
    if not {"run", "measure", "peer_class"} <= set(stored):
        raise ArgumentError(f"{path} is no collection of peers' runs: name another file, which will be created")
    if (stored["measure"] != MEASURE_VERSION).any():
        raise ArgumentError(
            f"{path} holds figures of measure {sorted(set(stored['measure']))}, and this version writes "
            f"{MEASURE_VERSION}: name another file, or run all classes again"
        )
    return stored


def stored_runs() -> pd.DataFrame:
    """The collection that is stored beside notebook 13: every class, on the machine of the stored notebooks.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: its figures have another meaning than this version's.

    Taught in: notebooks/13_peers.ipynb
    """
    return read_collection(NOTEBOOK_FOLDER / STORED)


def comparisons(collection: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Machine (`env_id`), class and runs of each comparison in a collection, in their order."""
    for (machine, name), runs in collection.groupby(["env_id", "peer_class"], sort=False):
        yield str(machine), str(name), runs


CORES = (1, 2, 4, 8, 16, 32, 64, 128)


def predict_cores(table: pd.DataFrame, cores: Sequence[int] = CORES) -> pd.DataFrame:
    """Images per second of threads in one process, on a number of cores: a prediction, not a measurement.

    The cores deliver `cores` / CPU seconds per image, until the lock is held all the time. Memory bandwidth, clock
    rates and hyper-threads are left out, so the truth lies below.

    Args:
        table: As `peer_table` returns it, with `cpu_s_per_1000` and `gil_us_per_image`; rows without both are left out.
        cores: Numbers of cores.

    Returns:
        One row per loader and number of cores: `variant`, `cores`, `images_per_s`, `n_processes`, how many processes
        would lift the bound of the lock, and `simulated` (`"predicted"`).

    Taught in: notebooks/13_peers.ipynb
    """
    known = table.dropna(subset=["cpu_s_per_1000", "gil_us_per_image"])
    rows = []
    for name, row in known[known["gil_us_per_image"] > 0].iterrows():
        lock = 1e6 / row["gil_us_per_image"]
        for number in cores:
            free = number * 1000 / row["cpu_s_per_1000"]
            rows.append({
                "variant": name, "cores": number, "images_per_s": min(free, lock),
                "n_processes": max(1, -int(-free // lock)), "simulated": "predicted",
            })  # fmt: skip
    return pd.DataFrame(rows)


def plot_cores(
    predicted: pd.DataFrame, measured: pd.DataFrame, *, ax: Axes | None = None, about: str = "", **kwargs: Any
) -> Axes:
    """Predicted rates over cores as dashed lines, and what was measured as filled marks.

    The title says where the lock ends the growth of the fastest.

    Args:
        predicted: From `predict_cores`.
        measured: Columns `variant`, as in `predicted`, `cores` and `images_per_s`.
        about: What was measured; the title begins with it.
        **kwargs: Passed to `Axes.plot` for the lines.

    Taught in: notebooks/13_peers.ipynb
    """
    ax = ax or make_axes(5)
    for color, marker, (name, line) in zip(COLORS, MARKERS, predicted.groupby("variant", sort=False), strict=False):
        style = {"linestyle": "--", "color": color, "marker": marker, "markerfacecolor": "white", "label": name}
        ax.plot(line["cores"], line["images_per_s"], **{**style, **kwargs})
        dots = measured[measured["variant"] == name]
        ax.scatter(dots["cores"], dots["images_per_s"], color=color, marker=marker, s=70, zorder=3)
    ax.plot([], [], "--", color="0.4", label="predicted: cores, then the lock")
    ax.scatter([], [], color="0.4", label="measured")
    ax.set(xscale="log", yscale="log", xlabel="cores of one process", ylabel="images per second")
    ax.set_xticks(sorted(set(predicted["cores"])), [str(number) for number in sorted(set(predicted["cores"]))])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    ax.grid(alpha=0.3)
    put_legend_below(ax, columns=2)
    message = "no loader has a measured lock: nothing is predicted"
    if len(predicted):
        best = predicted[predicted["variant"] == predicted.loc[predicted["images_per_s"].idxmax(), "variant"]]
        first, top = best.iloc[0], best.loc[best["images_per_s"].idxmax()]
        ratio = format_ratio(top["images_per_s"] / first["images_per_s"])
        message = f"{top['variant']} on {top['cores']} cores: predicted {ratio}x of {first['cores']}"
    write_title(ax, f"{about}: {message}" if about else message)
    return ax


_SETTLING_SHARE = 1 / 4
_MIN_BATCHES = 4  # of an epoch: fewer have no steady state, and the whole run counts
_MAX_SHARE = 4  # a run lasts at most about this many times `Work.min_steady_s`, unless one epoch takes longer

# Epochs of a run, by loader, as its first run plans them: not from its first epoch, in which it may compile or start
# workers, but from a second one. If each run ended when its own clock said so, slow ones would be cut short, and the
# mean rate would be too low.
_n_epochs: dict[str, int] = {}


@dataclass
class Timing:
    """What was read of a loader: all of it, and the steady parts of its epochs."""

    n_images: int = 0
    whole_s: float = 0.0
    n_steady_batches: int = 0
    n_steady_images: int = 0
    steady_s: float = 0.0

    def columns(self, cpu_s: float, cores: CoreTime) -> dict[str, Any]:
        """What `compare` takes as the run's figures. The arguments are of the whole run, the loader's and all cores'.

        Of them the steady states get their share of the images: reading them at each border would let queues fill.
        """
        is_steady = self.n_steady_images > 0
        n_images, seconds = (self.n_steady_images, self.steady_s) if is_steady else (self.n_images, self.whole_s)
        share = n_images / self.n_images
        return {
            "images_per_s": n_images / seconds if seconds > 0 else float("inf"),
            "steady_s": self.steady_s,
            "n_steady_batches": self.n_steady_batches,
            "n_steady_images": self.n_steady_images,
            "is_steady": is_steady,
            "cpu_s": cpu_s * share,
            "steal_s": cores.stolen_s * share,
            "others_cpu_s": max(0.0, cores.busy_s - cpu_s) * share,
        }


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
        self.timing, self._n_epoch_images = Timing(), 0
        self._batches: Iterator[Any] = iter(())

    def start(self) -> None:
        """Begin an epoch: what a loader does before it waits for its first batch is start-up."""
        self._batches, self._n_epoch_images = iter(self._peer.loader(self._work)), 0

    def take_first(self) -> int:
        """Wait for the first batch; returns its images, 0 if there is none."""
        begin = self._clock()
        self._take()
        self.timing.whole_s += self._clock() - begin
        return self.timing.n_images

    def take_rest(self) -> None:
        """Read to the end of the epoch, and of as many more as the loader's first run plans by its second epoch."""
        begin = self._clock()
        self._finish_epoch()
        if self._peer.name in _n_epochs:
            for _ in range(_n_epochs[self._peer.name] - 1):
                self.start()
                self._finish_epoch()
        else:
            second, steady_before_s = self._clock(), self.timing.steady_s
            self.start()
            self._finish_epoch()
            seconds = max(self.timing.steady_s - steady_before_s, (self._clock() - second) / _MAX_SHARE, 1e-6)
            _n_epochs[self._peer.name] = max(1, math.ceil(self._work.min_steady_s / seconds))
        self.timing.whole_s += self._clock() - begin

    def _finish_epoch(self) -> None:
        while self._n_epoch_images < self._n_settling and self._take():
            pass
        begin, n_before, n_batches = self._clock(), self.timing.n_images, 0
        while self._take():
            n_batches, end = n_batches + 1, self._clock()  # what follows the last batch is the end of the workers
        if n_batches >= _MIN_BATCHES:
            self.timing.steady_s += end - begin
            self.timing.n_steady_batches += n_batches
            self.timing.n_steady_images += self.timing.n_images - n_before

    def _take(self) -> bool:
        from labkit.measure.steady import count_images, synchronize

        batch = next(self._batches, None)
        if batch is not None:
            synchronize()
            n_images = count_images(batch)
            self.timing.n_images += n_images
            self._n_epoch_images += n_images
        return batch is not None
