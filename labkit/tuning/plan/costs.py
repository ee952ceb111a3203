"""What an image costs a loader on this machine: core time, time under Python's lock, bytes; as files and prepared."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from labkit.core import encode_image, env_id, require_int, write_atomic
from labkit.tuning.plan.estimate import Estimate

DATA = ("photos", "photos at 256", "pixels at 256")
_SHORT_SIDE, _QUALITY = 256, 90
_GIL_S = 4.0
_N_SAMPLES = 250 * _GIL_S  # py-spy takes 250 a second


@dataclass(frozen=True)
class LoaderCosts:
    """What an image costs, by what is stored.

    Attributes:
        by_data: `photos` (the files as they are), `photos at 256` (JPEG, the shorter side 256 pixels) and
            `pixels at 256` (a `PixelStore`) -> `cpu_ms_per_image`, `gil_us_per_image` (left out if it could not be
            measured) and `kb_per_image`.
        notes: What could not be measured.
    """

    by_data: Mapping[str, Mapping[str, Estimate]]
    notes: Sequence[str] = ()

    def save_json(self, path: str | os.PathLike) -> Path:
        """Write them, for a plan on a machine without torch."""
        costs = {data: {name: asdict(each) for name, each in of.items()} for data, of in self.by_data.items()}
        write_atomic(Path(path), (json.dumps({"costs": costs, "notes": list(self.notes)}, indent=1) + "\n").encode())
        return Path(path)

    @classmethod
    def load_json(cls, path: str | os.PathLike) -> "LoaderCosts":
        """What `save_json` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file holds no costs; names it.
        """
        try:
            found = json.loads(Path(path).read_bytes())
            costs = {
                data: {name: Estimate(**each) for name, each in found["costs"][data].items()} for data in found["costs"]
            }
            if not set(costs) <= set(DATA):
                raise ValueError(f"unknown data {', '.join(set(costs) - set(DATA))}")
            return cls(costs, found["notes"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no costs of labkit.loader_costs: {error}") from error


def loader_costs(source: Any, *, n_images: int = 128, rounds: int = 5, gil: bool = True) -> LoaderCosts:
    """Measure here what an image costs `lk.BatchLoader` on one thread: as it is, as a small JPEG, as prepared pixels.

    A sample of the images is read into memory once, so that storage is not part of it. Core time is that of the process
    in `rounds` interleaved rounds of `compare`; time under Python's lock is `labkit.measure.gil_us_per_image`'s, which
    needs py-spy (extra `peers`).

    Args:
        source: A store, or the path or URL of one, for `lk.open_store`.
        n_images: Of the sample, at equal distances; all if there are fewer.
        rounds: Their smallest and largest core time are the limits of its interval.
        gil: Also measure the time under Python's lock, about 7 s for each kind of data.

    Raises:
        FileNotFoundError, DecodeError: as the store and the decoder raise them.
        ValueError: fewer than one image or round, or an empty store.

    Taught in: notebooks/15_at_scale.ipynb
    """
    from labkit.core import ScratchFolder
    from labkit.data.pixels import PixelStore
    from labkit.data.stores import Store, open_store
    from labkit.measure import GilError

    require_int("n_images", n_images)
    require_int("rounds", rounds)
    store = source if isinstance(source, Store) else open_store(source)
    photos = _Sample.of(store, n_images)
    notes: list[str] = []
    with ScratchFolder() as folder:
        pixels = PixelStore.build(photos, folder / "sample.pixels", short_side=_SHORT_SIDE, progress=False)
        stored = {"photos": photos, "photos at 256": photos.small(), "pixels at 256": pixels}
        found = _core_times(stored, rounds)
        for data, of in stored.items():
            found[data]["kb_per_image"] = _size(of, len(photos.keys()))
            if gil and not notes:
                try:
                    found[data]["gil_us_per_image"] = _lock_time(of, found[data]["cpu_ms_per_image"].value)
                except GilError as error:
                    notes.append(f"time under Python's lock is not known: {error}")
    return LoaderCosts(found, notes)


class _Sample:
    """Some images of a store, in memory."""

    def __init__(self, images: dict[str, bytes]):
        self._images = images

    @classmethod
    def of(cls, store: Any, n_images: int) -> "_Sample":
        keys = store.keys()
        if not len(keys):
            raise ValueError(f"{store!r} holds no images")
        chosen = np.unique(np.linspace(0, len(keys) - 1, min(n_images, len(keys))).round().astype(int))
        return cls({keys[number]: store.read(keys[number]) for number in chosen.tolist()})

    def small(self) -> "_Sample":
        """The same as JPEGs whose shorter side has 256 pixels."""
        from PIL import Image

        from labkit.data import decode
        from labkit.data.pixels import shrink

        arrays = {key: shrink(decode(data, key=key), _SHORT_SIDE) for key, data in self._images.items()}
        return _Sample(
            {key: encode_image(Image.fromarray(array), "JPEG", quality=_QUALITY) for key, array in arrays.items()}
        )

    def keys(self) -> list[str]:
        return list(self._images)

    def read(self, key: str) -> bytes:
        return self._images[key]

    def sizes(self) -> np.ndarray:
        return np.array([len(data) for data in self._images.values()])


def _loader(of: Any) -> Any:
    from labkit.pipeline.batch_loader import BatchLoader

    return BatchLoader(of, num_threads=1, pin_memory=False)


def _same(loader: Any) -> Any:
    return loader


def _core_times(stored: dict[str, Any], rounds: int) -> dict[str, dict[str, Estimate]]:
    from labkit.measure import compare, measured_runs

    loaders = {data: _loader(of) for data, of in stored.items()}
    frame = measured_runs(
        compare({data: partial(_same, loader) for data, loader in loaders.items()}, baseline=DATA[0], rounds=rounds,
                experiment="plan", rung=False, verdicts=False, progress=False)
    )  # fmt: skip
    source = f"lk.loader_costs: lk.BatchLoader on one thread, {rounds} rounds on {env_id()}"
    counted = frame["n_images"].where(~frame["is_steady"].astype(bool), frame["n_steady_images"])
    ms = (1e3 * frame["cpu_s"] / counted).groupby(frame["variant"])
    limits = ms.agg(["median", "min", "max"])
    return {data: {"cpu_ms_per_image": _measured(limits.loc[data].tolist(), source)} for data in stored}


def _measured(numbers: list[float], source: str) -> Estimate:
    value, low, high = numbers
    return Estimate(value, low, high, source, "measured here")


def _lock_time(of: Any, cpu_ms: float) -> Estimate:
    """One thread works, so the lock is held for a share of its core time; samples of the share scatter."""
    from labkit.measure import gil_us_per_image

    loader = _loader(of)
    us = max(gil_us_per_image(lambda: loader, seconds=_GIL_S), 1e3 * cpu_ms / _N_SAMPLES)  # at least one sample
    share = min(1.0, us / (1e3 * cpu_ms))
    spread = 1.96 * math.sqrt((1 - share) / (share * _N_SAMPLES))
    source = f"labkit.measure.gil_us_per_image: lk.BatchLoader on one thread, on {env_id()}"
    return Estimate(us, us / (1 + spread), us * (1 + spread), source, "measured here")


def _size(of: Any, n_images: int) -> Estimate:
    if isinstance(of, _Sample):
        sizes = of.sizes() / 1e3
        spread = 1.96 * float(sizes.std()) / math.sqrt(len(sizes)) / float(sizes.mean())
        source, mean = f"mean of {n_images} images of the sample", float(sizes.mean())
    else:
        mean, spread = Path(of.path).stat().st_size / n_images / 1e3, 0.0
        source = f"file of {n_images} images of the sample"
    return Estimate(mean, mean / (1 + spread), mean * (1 + spread), f"lk.loader_costs: {source}", "measured here")
