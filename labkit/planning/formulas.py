"""The formulas of a plan: what it takes to keep the GPUs busy, what each resource gives at most, and what follows.

Every input is an `Estimate`, a number with its uncertainty and source, and random draws carry them through all
formulas. `loader_costs` measures what an image costs here.

Requests in flight follow Little's law, L = rate x time (J. D. C. Little, Operations Research 9, 1961,
https://doi.org/10.1287/opre.9.3.383). The ceilings are those of operational analysis: a resource gives at most its
number of servers / the time that an image holds one, and the whole no more than its scarcest resource (Denning and
Buzen, ACM Computing Surveys 10, 1978, https://doi.org/10.1145/356733.356735). They are upper limits. Where two
resources are equally scarce, times vary and few batches are made ahead, the rate is up to a third lower:
tests/planning/test_formulas.py compares them with a simulation.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from labkit.errors import ArgumentError
from labkit.util.arguments import require_choice, require_file, require_int
from labkit.util.files import write_atomic
from labkit.util.machine import env_id
from labkit.util.pictures import encode_image

KINDS = ("measured here", "entered", "published", "theory", "assumed")
N_DRAWS = 4001  # odd: one of them is the median
QUANTILE = 1.959964  # of the normal distribution: 95 % lie within this many standard deviations


@dataclass(frozen=True)
class Estimate:
    """A number and what is known of it.

    Args:
        value: The median.
        low, high: The limits of its 95 % interval. Default: it is exact.
        source: A run, an address, or who said so.
        kind: One of `measured here`, `entered`, `published`, `theory` and `assumed`.

    Raises:
        ValueError: not finite numbers with 0 < low <= value <= high, or all of them 0; or an unknown kind.
    """

    value: float
    low: float | None = None
    high: float | None = None
    source: str = "entered"
    kind: str = "entered"

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        low, high = self.interval
        is_exact_zero = low == self.value == high == 0
        if not (all(map(_is_finite, (low, self.value, high))) and (is_exact_zero or 0 < low <= self.value <= high)):
            raise ArgumentError(
                "an estimate must be one number >= 0, or numbers 0 < low <= value <= high, "
                f"got low={self.low!r}, value={self.value!r}, high={self.high!r}"
            )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def draw(self, name: str) -> np.ndarray:
        """Values, log-normal on either side of the median: `N_DRAWS` evenly spread ones, in an order drawn by `name`.

        So two plans that differ in one input share the draws of all others.

        Source: M. D. McKay and others, Technometrics 21, 1979 (Latin hypercube sampling),
        https://doi.org/10.1080/00401706.1979.10489755
        """
        if self.interval == (self.value, self.value):
            return np.full(N_DRAWS, float(self.value))
        drawn = np.random.default_rng(zlib.crc32(name.encode())).permutation(_deviates())
        below, above = (abs(math.log(end / self.value)) / QUANTILE for end in self.interval)
        return self.value * np.exp(drawn * np.where(drawn < 0, below, above))


@cache
def _deviates() -> np.ndarray:
    """`N_DRAWS` values of the normal distribution, in steps of equal probability, the smallest first."""
    return np.array([NormalDist().inv_cdf((step + 0.5) / N_DRAWS) for step in range(N_DRAWS)])


def as_estimate(name: str, given: Any) -> Estimate:
    """What a reader gave: an `Estimate`, a number, (low, high) or (low, value, high).

    Raises:
        ValueError: it is none of them; names the argument.
    """
    if isinstance(given, Estimate):
        return given
    numbers = [given] if _is_finite(given) else given
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str) and 1 <= len(numbers) <= 3
    if not is_list or not all(map(_is_finite, numbers)):
        raise ArgumentError(f"{name} must be a number, (low, high) or (low, value, high), got {given!r}")
    low, high = float(numbers[0]), float(numbers[-1])
    try:
        value = float(numbers[1]) if len(numbers) == 3 else math.sqrt(low * high) if len(numbers) == 2 else low
        return Estimate(value, low, high)
    except ValueError as error:
        raise ArgumentError(f"{name}: {error}") from None


def of_draws(values: np.ndarray) -> tuple[float, float, float]:
    """Median and 95 % interval of draws."""
    low, value, high = np.quantile(values, (0.025, 0.5, 0.975))
    return float(value), float(low), float(high)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def format_number(value: float) -> str:
    """A number with three significant digits, as 57,200 and 0.123."""
    return f"{float(f'{value:.3g}'):,.10g}"


DATA = ("photos", "photos at 256", "pixels at 256")
_SHORT_SIDE, _QUALITY = 256, 90
# Runs of other days differ by more than the rounds of one: the same photos took 0.81 to 1.17 ms of a core, and 50 to
# 105 microseconds under the lock. So an interval reaches at least this far to either side.
_OTHER_DAYS, _OTHER_DAYS_LOCK = 1.2, 1.45
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
        remedy = "name a file that save_json wrote, or measure the costs of its images by lk.loader_costs"
        path = require_file("costs", path, remedy)
        try:
            found = json.loads(path.read_bytes())
            costs = {
                require_choice("data", data, DATA): {name: Estimate(**each) for name, each in of.items()}
                for data, of in found["costs"].items()
            }
            return cls(costs, found["notes"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{path} holds no costs of labkit.loader_costs: {error}") from error


def loader_costs(source: Any, *, n_images: int = 128, rounds: int = 5) -> LoaderCosts:
    """Measure here what an image costs `lk.BatchLoader` on one thread: as it is, as a small JPEG, as prepared pixels.

    A sample of the images is read into memory once, so that storage is not part of it. Core time is that of the process
    in `rounds` interleaved rounds of `compare`; time under Python's lock is `gil_us_per_image`'s, which needs py-spy
    (extra `peers`) and about 7 s for each kind of data.

    Args:
        source: A store, or the path or URL of one, for `lk.open_store`.
        n_images: Of the sample, at equal distances; all if there are fewer.
        rounds: The interval of the core time holds theirs, and 20 % to either side, by which days differ.

    >>> costs = lk.loader_costs("photos", n_images=8, rounds=3)  # doctest: +SKIP
    >>> print(lk.plan(gpu="h100", n_gpus=8, costs=costs, storage="s3"))  # doctest: +SKIP

    Raises:
        FileNotFoundError, DecodeError: as the store and the decoder raise them.
        ValueError: fewer than one image or round, or an empty store.

    Taught in: notebooks/15_at_scale.ipynb
    """
    from PIL import Image

    from labkit.data.decode import decode
    from labkit.data.pixels import PixelStore, shrink
    from labkit.data.remote import as_store
    from labkit.errors import GilError
    from labkit.loading.batch_loader import BatchLoader
    from labkit.measure.compare import compare
    from labkit.measure.frames import measured_runs
    from labkit.util.files import ScratchFolder

    rounds = require_int("rounds", rounds)
    store = as_store(source)
    keys, n_images = store.keys(), require_int("n_images", n_images)
    if not len(keys):
        raise ArgumentError(f"{store!r} holds no images")
    chosen = np.unique(np.linspace(0, len(keys) - 1, min(n_images, len(keys))).round().astype(int))
    photos = {keys[number]: store.read(keys[number]) for number in chosen.tolist()}
    small = {
        key: encode_image(Image.fromarray(shrink(decode(data, key=key), _SHORT_SIDE)), "JPEG", quality=_QUALITY)
        for key, data in photos.items()
    }
    here = f"lk.BatchLoader on one thread, {rounds} rounds on {env_id()}"
    found: dict[str, dict[str, Estimate]] = {}
    notes: list[str] = []
    with ScratchFolder() as folder:
        pixels = PixelStore.build(photos, folder / "sample.pixels", short_side=_SHORT_SIDE, progress=False)
        stored: dict[str, Any] = {"photos": photos, "photos at 256": small, "pixels at 256": pixels}
        loaders = {data: BatchLoader(of, num_threads=1, pin_memory=False) for data, of in stored.items()}
        frame = measured_runs(
            compare({data: partial(loaders.__getitem__, data) for data in stored}, baseline=DATA[0], rounds=rounds,
                    experiment="plan", rung=False, verdicts=False, progress=False)
        )  # fmt: skip
        counted = frame["n_images"].where(~frame["is_steady"].astype(bool), frame["n_steady_images"])
        ms = (
            (1e3 * frame["cpu_s"] / counted)
            .groupby(frame["variant"])
            .agg(
                value="median",
                low=lambda each: min(each.min(), each.median() / _OTHER_DAYS),
                high=lambda each: max(each.max(), each.median() * _OTHER_DAYS),
            )
        )
        for data, of in stored.items():
            cpu_ms = Estimate(**ms.loc[data], source=f"lk.loader_costs: {here}", kind="measured here")
            found[data] = {"cpu_ms_per_image": cpu_ms, "kb_per_image": _kb_per_image(of, len(photos))}
            try:
                if not notes:
                    found[data]["gil_us_per_image"] = _lock_time(loaders[data], cpu_ms)
            except GilError as error:
                notes.append(f"time under Python's lock is not known: {error}")
    return LoaderCosts(found, notes)


def _kb_per_image(of: Any, n_images: int) -> Estimate:
    """The mean of a sample, with its error; a `PixelStore` is one file."""
    is_sample = isinstance(of, dict)
    sizes = list(map(len, of.values())) if is_sample else [Path(of.path).stat().st_size / n_images]
    mean = float(np.mean(sizes)) / 1e3
    spread = 1 + QUANTILE * float(np.std(sizes)) / 1e3 / mean / math.sqrt(len(sizes))
    source = f"lk.loader_costs: {'mean' if is_sample else 'file'} of {n_images} images of the sample"
    return Estimate(mean, mean / spread, mean * spread, source, "measured here")


def _lock_time(loader: Any, cpu_ms: Estimate) -> Estimate:
    """One thread works, so the lock is held for a share of its core time."""
    from labkit.measure.gil import gil_us_per_image

    cpu_us = 1e3 * cpu_ms.value
    us = max(gil_us_per_image(lambda: loader, seconds=_GIL_S), cpu_us / _N_SAMPLES)  # at least one sample
    source = f"labkit.measure.gil.gil_us_per_image: lk.BatchLoader on one thread, on {env_id()}"
    return Estimate(us, us / _OTHER_DAYS_LOCK, us * _OTHER_DAYS_LOCK, source, "measured here")


# Ceiling -> the resource, in texts.
RESOURCES = {
    "gpu_ceiling": "the GPUs",
    "core_ceiling": "the cores",
    "lock_ceiling": "Python's lock",
    "pcie_ceiling": "the PCIe bus",
    "network_ceiling": "the network",
    "request_rate_ceiling": "the storage's requests per second",
    "bandwidth_ceiling": "the storage's MB per second",
    "in_flight_ceiling": "the requests in flight",
}


class Formula(NamedTuple):
    """A quantity that is computed.

    Args:
        name: For other formulas, and for a plan's `value`.
        group: `need` (to keep the GPUs busy), `ceiling` (images/s at most) or `result`.
        unit: Empty for counts.
        text: The formula, of inputs and earlier formulas by their names. One that uses what is not known is left out.
    """

    name: str
    group: str
    unit: str
    text: str


FORMULAS = [
    Formula("demand", "need", "images/s", "images_per_s_per_gpu * n_gpus"),
    Formula("gpus_per_node", "need", "", "n_gpus / n_nodes"),
    # Without shards, a request is an image.
    Formula("images_per_request", "need", "images", "maximum(1, request_mb * 1e3 / kb_per_image)"),
    Formula("busy_cpu_ms", "need", "ms", "(cpu_ms_per_image + request_cpu_ms / images_per_request) * slowdown"),
    Formula("lock_us", "need", "us",
            "gil_us_per_image + 1e3 * request_cpu_ms * request_lock_share / images_per_request"),
    Formula("cores_per_gpu", "need", "cores", "images_per_s_per_gpu * busy_cpu_ms / 1e3 + step_cores_per_gpu"),
    Formula("cores_needed_per_node", "need", "cores", "cores_per_gpu * gpus_per_node"),
    Formula("processes_needed", "need", "processes", "maximum(1, ceil(images_per_s_per_gpu * lock_us / 1e6))"),
    Formula("mb_per_s_per_node", "need", "MB/s", "images_per_s_per_gpu * gpus_per_node * kb_per_image / 1e3"),
    # Gradients, which share the network, are not counted.
    Formula("gbit_per_s_per_node", "need", "Gbit/s",
            "images_per_s_per_gpu * gpus_per_node * network_kb_per_image * 8 / 1e6"),
    Formula("gbit_per_s", "need", "Gbit/s", "gbit_per_s_per_node * n_nodes"),
    Formula("requests_needed_per_s", "need", "requests/s", "demand / images_per_request"),
    Formula("request_ms", "need", "ms", "latency_ms + images_per_request * kb_per_image / mb_per_s_per_request"),
    Formula("in_flight_needed", "need", "requests", "requests_needed_per_s * request_ms / 1e3"),  # Little's law
    Formula("in_flight_needed_per_gpu", "need", "requests", "in_flight_needed / n_gpus"),
    Formula("batch_kb_per_image", "need", "KB", "crop_size ** 2 * 3 * bytes_per_value / 1e3"),  # of 3 colors
    Formula("pcie_needed_gb_per_s", "need", "GB/s", "images_per_s_per_gpu * batch_kb_per_image / 1e6"),
    Formula("memory_gb", "need", "GB",
            "gpus_per_node * (batches_ahead * batch_size * batch_kb_per_image / 1e6"
            " + in_flight_needed_per_gpu * images_per_request * kb_per_image / 1e6"
            " + maximum(processes_per_gpu, processes_needed) * process_gb)"),
    Formula("dataset_gb", "need", "GB", "n_images * kb_per_image / 1e6"),
    Formula("shards", "need", "shards", "ceil(dataset_gb * 1e3 / shard_mb)"),
    # The system shares cores evenly, so loading gets at least half of them.
    Formula("loading_cores_per_node", "need", "cores",
            "maximum(cores_per_node - step_cores_per_gpu * gpus_per_node, cores_per_node / 2)"),
    # As given, else by a thread a core that reads and then decodes.
    Formula("requesting_threads_per_gpu", "need", "threads",
            "where(requests_in_flight_per_gpu > 0, requests_in_flight_per_gpu,"
            " maximum(1, loading_cores_per_node) / gpus_per_node)"),
    # Without shards, each has a place in one of the batches ahead of the one in use.
    Formula("in_flight_per_gpu", "need", "requests",
            "where(request_mb > 0, requesting_threads_per_gpu,"
            " minimum(requesting_threads_per_gpu, (batches_ahead - 1) * batch_size))"),
    Formula("gpu_ceiling", "ceiling", "images/s", "demand"),
    Formula("core_ceiling", "ceiling", "images/s", "loading_cores_per_node * n_nodes * 1e3 / busy_cpu_ms"),
    Formula("lock_ceiling", "ceiling", "images/s", "n_gpus * processes_per_gpu * 1e6 / lock_us"),
    Formula("pcie_ceiling", "ceiling", "images/s", "n_gpus * pcie_gb_per_s * 1e6 / batch_kb_per_image"),
    Formula("network_ceiling", "ceiling", "images/s",
            "n_nodes * network_gbit_per_node / 8 * 1e6 / network_kb_per_image"),
    Formula("request_rate_ceiling", "ceiling", "images/s", "requests_per_s * images_per_request * n_request_queues"),
    Formula("bandwidth_ceiling", "ceiling", "images/s", "storage_mb_per_s * n_storages * 1e3 / kb_per_image"),
    Formula("in_flight_ceiling", "ceiling", "images/s",
            "n_gpus * in_flight_per_gpu * images_per_request * 1e3"
            " / (request_ms + where(requests_in_flight_per_gpu > 0, 0, images_per_request * busy_cpu_ms))"),
    Formula("images_per_s", "result", "images/s", f"smallest({', '.join(RESOURCES)})"),
    Formula("busy_share", "result", "of 1", "images_per_s / demand"),  # of the GPUs' time
    Formula("epoch_hours", "result", "hours", "n_images / images_per_s / 3600"),
]  # fmt: skip

# What these count for where they are not known; a ceiling that is not known is none.
_UNKNOWN = {
    **dict.fromkeys(("request_mb", "request_cpu_ms", "gil_us_per_image", "requests_in_flight_per_gpu"), 0.0),
    **dict.fromkeys(("in_flight_needed_per_gpu", "processes_needed"), 0.0),
    **dict.fromkeys(RESOURCES, math.inf),
}
_FUNCTIONS = {
    "maximum": np.maximum, "minimum": np.minimum, "ceil": np.ceil, "where": np.where,
    "smallest": lambda *values: np.minimum.reduce(np.broadcast_arrays(*values)),
}  # fmt: skip

_RARE = 0.1  # share of the draws
_FEW_IN_FLIGHT = 1.1  # with less to gain, a thread that reads and decodes is held up by decoding


@dataclass(frozen=True, eq=False)
class Setup:
    """A training and the machines for it.

    Attributes:
        inputs: By name, as `labkit.planning.plan.INPUTS` lists them.
        storage: One of `labkit.planning.published.STORAGES`.
        data: What is stored, one of `DATA`.
        known_costs: Costs by what is stored, as far as they are known.
        draws: Every input and formula -> its draws.
        sources: Every input and formula -> where it comes from, through all formulas that it uses.
    """

    inputs: Mapping[str, Estimate]
    storage: str
    data: str
    known_costs: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    draws: dict[str, np.ndarray] = field(init=False, default_factory=dict)
    sources: dict[str, list[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        draws, sources = self.draws, self.sources
        for name, estimate in self.inputs.items():
            draws[name], sources[name] = estimate.draw(name), [f"{name}: {estimate.source}"]
        remote = {"network_kb_per_image": "kb_per_image", "n_request_queues": "n_prefixes", "n_storages": "one"}
        local = {"n_request_queues": "n_nodes", "n_storages": "n_nodes"}  # each node has a disk of its own
        draws["one"], sources["one"] = np.ones(N_DRAWS), []
        for name, of in (remote if self.is_remote else local).items():
            draws[name], sources[name] = draws[of], sources[of]
        for formula in FORMULAS:
            try:
                found = eval(formula.text, _FUNCTIONS, {**_UNKNOWN, **draws})  # noqa: S307 - of the table above
            except NameError:
                continue
            if formula.name != "lock_us" or np.any(found):  # no time under the lock is an unknown one
                used = [name for name in re.findall(r"\w+", formula.text) if name in draws]
                draws[formula.name] = found
                sources[formula.name] = list(dict.fromkeys(each for name in used for each in sources[name]))

    @property
    def is_remote(self) -> bool:
        """Whether images come over the network."""
        return self.storage == "s3"

    @property
    def is_sharded(self) -> bool:
        """Whether a request brings a part of a shard, not a single image."""
        return "request_mb" in self.inputs

    @property
    def rate(self) -> np.ndarray:
        """Images/s of the training."""
        return self.draws["images_per_s"]

    def median(self, name: str) -> float:
        return float(np.median(self.draws[name]))

    @cached_property
    def scarcities(self) -> dict[str, float]:
        """Ceiling -> in which share of the draws it is the smallest, the most frequent first."""
        names = [name for name in RESOURCES if name in self.draws]
        rates = np.array([self.draws[name] * (_FEW_IN_FLIGHT if "in_flight" in name else 1) for name in names])
        shares = np.bincount(rates.argmin(axis=0), minlength=len(names)) / N_DRAWS
        found = {name: float(share) for name, share in zip(names, shares, strict=True) if share}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def scarcest(self) -> str:
        """The ceiling that is the smallest in most of the draws."""
        return next(iter(self.scarcities))

    @property
    def to_fix(self) -> str | None:
        """The scarcest resource after the GPUs; None if hardly any draw has another."""
        others = {name: share for name, share in self.scarcities.items() if name != "gpu_ceiling"}
        return next((name for name, share in others.items() if share >= _RARE), None)
