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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

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
    photos = _Sample.of(store, require_int("n_images", n_images))
    small = {
        key: encode_image(Image.fromarray(shrink(decode(data, key=key), _SHORT_SIDE)), "JPEG", quality=_QUALITY)
        for key, data in photos.images.items()
    }
    here = f"lk.BatchLoader on one thread, {rounds} rounds on {env_id()}"
    found: dict[str, dict[str, Estimate]] = {}
    notes: list[str] = []
    with ScratchFolder() as folder:
        pixels = PixelStore.build(photos, folder / "sample.pixels", short_side=_SHORT_SIDE, progress=False)
        stored: dict[str, Any] = {"photos": photos, "photos at 256": _Sample(small), "pixels at 256": pixels}
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
            found[data] = {"cpu_ms_per_image": cpu_ms, "kb_per_image": _kb_per_image(of, len(photos.images))}
            try:
                if not notes:
                    found[data]["gil_us_per_image"] = _lock_time(loaders[data], cpu_ms)
            except GilError as error:
                notes.append(f"time under Python's lock is not known: {error}")
    return LoaderCosts(found, notes)


class _Sample:
    """A store of some images of another one, in memory."""

    def __init__(self, images: dict[str, bytes]):
        self.images = images

    @classmethod
    def of(cls, store: Any, n_images: int) -> "_Sample":
        keys = store.keys()
        if not len(keys):
            raise ArgumentError(f"{store!r} holds no images")
        chosen = np.unique(np.linspace(0, len(keys) - 1, min(n_images, len(keys))).round().astype(int))
        return cls({keys[number]: store.read(keys[number]) for number in chosen.tolist()})

    def keys(self) -> list[str]:
        return list(self.images)

    def read(self, key: str) -> bytes:
        return self.images[key]


def _kb_per_image(of: Any, n_images: int) -> Estimate:
    """The mean of a sample, with its error; a `PixelStore` is one file."""
    is_sample = isinstance(of, _Sample)
    sizes = [len(data) for data in of.images.values()] if is_sample else [Path(of.path).stat().st_size / n_images]
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


class Values:
    """Draws by name, as attributes; notes which a formula has used."""

    def __init__(self, draws: Mapping[str, np.ndarray]):
        self.draws, self.used = draws, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.used.append(name)
        return self.draws[name]

    def known(self, name: str, default: Any) -> Any:
        """A quantity, or the default if it is not known."""
        return getattr(self, name) if name in self.draws else default


@dataclass(frozen=True)
class Formula:
    """A quantity that is computed.

    Args:
        name: For other formulas and a plan's `value`.
        group: `need` (to keep the GPUs busy), `ceiling` (images/s at most) or `result`.
        label, unit, text: As a plan shows them; the text is the formula in words.
        function: Takes `Values` of inputs and earlier formulas, and gives an array. One that uses what is not known is
            left out.
        only_with: Left out too unless this is known; "remote" is, if images come over a network.
    """

    name: str
    group: str
    label: str
    unit: str
    text: str
    function: Callable[[Values], Any]
    only_with: str = ""


def _memory_gb(v: Values) -> Any:
    batches_gb = v.batches_ahead * v.batch_size * v.batch_kb_per_image / 1e6
    requests_gb = v.known("in_flight_needed_per_gpu", 0.0) * v.images_per_request * v.kb_per_image / 1e6
    processes = np.maximum(v.processes_per_gpu, v.known("processes_needed", 1))
    return v.gpus_per_node * (batches_gb + requests_gb + processes * v.process_gb)


def _lock_us(v: Values) -> Any:
    if not np.any(v.draws.get("request_cpu_ms", 0)):
        return v.gil_us_per_image
    of_request_us = 1e3 * v.request_cpu_ms * v.request_lock_share
    return v.known("gil_us_per_image", 0.0) + of_request_us / v.images_per_request


def _in_flight_per_gpu(v: Values) -> Any:
    threads = np.maximum(1, v.loading_cores_per_node) / v.gpus_per_node
    requests = v.known("requests_in_flight_per_gpu", threads)
    with_shards = v.known("request_mb", None) is not None
    return requests if with_shards else np.minimum(requests, (v.batches_ahead - 1) * v.batch_size)


def _in_flight_ceiling(v: Values) -> Any:
    are_apart = v.known("requests_in_flight_per_gpu", None) is not None
    decoding_ms = 0.0 if are_apart else v.images_per_request * v.busy_cpu_ms
    return v.n_gpus * v.in_flight_per_gpu * v.images_per_request * 1e3 / (v.request_ms + decoding_ms)


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


def _ceiling(name: str, text: str, function: Callable[[Values], Any], only_with: str = "") -> Formula:
    return Formula(name, "ceiling", RESOURCES[name], "images/s", text, function, only_with)


FORMULAS = [
    Formula("demand", "need", "images, all GPUs", "images/s", "images/s of a GPU x GPUs",
            lambda v: v.images_per_s_per_gpu * v.n_gpus),
    Formula("gpus_per_node", "need", "GPUs a node", "", "GPUs / nodes", lambda v: v.n_gpus / v.n_nodes),
    Formula("images_per_request", "need", "images a request", "images",
            "MB of a request / KB of an image, at least 1; without shards 1",
            lambda v: np.maximum(1, v.known("request_mb", 0) * 1e3 / v.kb_per_image)),
    Formula("busy_cpu_ms", "need", "core time of an image, all cores busy", "ms",
            "(core time of an image + the client's of a request / images a request) x slowdown with all cores busy",
            lambda v: (v.cpu_ms_per_image + v.known("request_cpu_ms", 0.0) / v.images_per_request) * v.slowdown),
    Formula("lock_us", "need", "time of an image under Python's lock, its request included", "us",
            "time of an image under Python's lock + the client's of a request x its share under it / images a request",
            _lock_us),
    Formula("cores_per_gpu", "need", "cores a GPU", "cores",
            "images/s of a GPU x core time of an image + cores of its step",
            lambda v: v.images_per_s_per_gpu * v.busy_cpu_ms / 1e3 + v.step_cores_per_gpu),
    Formula("cores_needed_per_node", "need", "cores a node", "cores", "cores a GPU x GPUs a node",
            lambda v: v.cores_per_gpu * v.gpus_per_node),
    Formula("processes_needed", "need", "loader processes a GPU", "processes",
            "images/s of a GPU x time under Python's lock, rounded up",
            lambda v: np.maximum(1, np.ceil(v.images_per_s_per_gpu * v.lock_us / 1e6))),
    Formula("mb_per_s_per_node", "need", "from storage, a node", "MB/s",
            "images/s of a GPU x GPUs a node x KB of an image",
            lambda v: v.images_per_s_per_gpu * v.gpus_per_node * v.kb_per_image / 1e3),
    Formula("gbit_per_s_per_node", "need", "network, a node", "Gbit/s",
            "MB/s of a node x 8 bits; gradients not included", lambda v: v.mb_per_s_per_node * 8 / 1e3, "remote"),
    Formula("gbit_per_s", "need", "network, in all", "Gbit/s", "Gbit/s of a node x nodes",
            lambda v: v.gbit_per_s_per_node * v.n_nodes, "remote"),
    Formula("requests_needed_per_s", "need", "requests, in all", "requests/s", "images/s / images a request",
            lambda v: v.demand / v.images_per_request),
    Formula("prefixes_needed", "need", "prefixes", "prefixes", "requests/s / requests/s of a prefix, rounded up",
            lambda v: np.ceil(v.requests_needed_per_s / v.requests_per_s), "n_prefixes"),
    Formula("request_ms", "need", "time of a request", "ms",
            "latency + KB of an image x images a request / MB/s of a request",
            lambda v: v.latency_ms + v.images_per_request * v.kb_per_image / v.mb_per_s_per_request),
    Formula("in_flight_needed", "need", "requests in flight, in all", "requests",
            "Little's law: requests/s x time of a request", lambda v: v.requests_needed_per_s * v.request_ms / 1e3),
    Formula("in_flight_needed_per_gpu", "need", "requests in flight, a GPU", "requests", "requests in flight / GPUs",
            lambda v: v.in_flight_needed / v.n_gpus),
    Formula("batch_kb_per_image", "need", "KB of an image on the bus", "KB",
            "crop size squared x 3 colors x bytes of a value", lambda v: v.crop_size**2 * 3 * v.bytes_per_value / 1e3),
    Formula("pcie_needed_gb_per_s", "need", "PCIe, a GPU", "GB/s", "images/s of a GPU x KB of an image on the bus",
            lambda v: v.images_per_s_per_gpu * v.batch_kb_per_image / 1e6),
    Formula("memory_gb", "need", "memory of the loaders, a node", "GB",
            "GPUs a node x (batches ahead x batch size x KB on the bus + requests in flight x their KB + processes x "
            "GB)",
            _memory_gb),
    Formula("dataset_gb", "need", "disk for the images", "GB", "images x KB of an image",
            lambda v: v.n_images * v.kb_per_image / 1e6),
    Formula("shards", "need", "shards", "shards", "GB of all images / MB of a shard, rounded up",
            lambda v: np.ceil(v.dataset_gb * 1e3 / v.shard_mb)),
    Formula("loading_cores_per_node", "need", "cores left for loading, a node", "cores",
            "cores a node - cores of the steps; at least half, since the system shares cores evenly",
            lambda v: np.maximum(v.cores_per_node - v.step_cores_per_gpu * v.gpus_per_node, v.cores_per_node / 2)),
    Formula("in_flight_per_gpu", "need", "requests in flight that there are, a GPU", "requests",
            "as given, else a thread a core; without shards at most the images of the batches ahead of the one in use",
            _in_flight_per_gpu),
    _ceiling("gpu_ceiling", "what the GPUs ask for", lambda v: v.demand),
    _ceiling("core_ceiling", "cores for loading x nodes / core time of an image",
             lambda v: v.loading_cores_per_node * v.n_nodes * 1e3 / v.busy_cpu_ms),
    _ceiling("lock_ceiling", "GPUs x loader processes a GPU / time under Python's lock",
             lambda v: v.n_gpus * v.processes_per_gpu * 1e6 / v.lock_us),
    _ceiling("pcie_ceiling", "GPUs x GB/s of a bus / KB of an image on the bus",
             lambda v: v.n_gpus * v.pcie_gb_per_s * 1e6 / v.batch_kb_per_image),
    _ceiling("network_ceiling", "nodes x Gbit/s of a node / 8 bits / KB of an image",
             lambda v: v.n_nodes * v.network_gbit_per_node / 8 * 1e6 / v.kb_per_image, "remote"),
    _ceiling("request_rate_ceiling",
             "requests/s x images a request x storages (nodes, if local; prefixes, if an object store)",
             lambda v: v.requests_per_s * v.images_per_request * v.n_storages * v.known("n_prefixes", 1)),
    _ceiling("bandwidth_ceiling", "MB/s x storages / KB of an image",
             lambda v: v.storage_mb_per_s * v.n_storages * 1e3 / v.kb_per_image),
    _ceiling("in_flight_ceiling",
             "requests in flight x images a request / time of a request; a thread a core reads and then decodes",
             _in_flight_ceiling),
    Formula("images_per_s", "result", "training", "images/s", "the smallest ceiling",
            lambda v: np.minimum.reduce([getattr(v, name) for name in RESOURCES if name in v.draws])),
    Formula("busy_share", "result", "the GPUs' time that they train", "of 1", "images/s / what the GPUs ask for",
            lambda v: v.images_per_s / v.demand),
    Formula("epoch_hours", "result", "an epoch", "hours", "images / images/s",
            lambda v: v.n_images / v.images_per_s / 3600),
]  # fmt: skip

_RARE = 0.1  # share of the draws
_FEW_IN_FLIGHT = 1.1  # with less to gain, a thread that reads and decodes is held up by decoding


@dataclass(frozen=True, eq=False)
class Setup:
    """A training and the machines for it.

    Attributes:
        inputs: By name, as `labkit.planning.plan.INPUTS` lists them.
        storage: Its name.
        is_remote: Images come over the network.
        data: What is stored, one of `DATA`.
        known_costs: Costs by what is stored, as far as they are known.
        draws: Every input and formula -> its draws.
        sources: Every input and formula -> where it comes from, through all formulas that it uses.
    """

    inputs: Mapping[str, Estimate]
    storage: str
    is_remote: bool
    data: str
    known_costs: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    draws: dict[str, np.ndarray] = field(init=False, default_factory=dict)
    sources: dict[str, list[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        draws, sources = self.draws, self.sources
        for name, estimate in self.inputs.items():
            draws[name], sources[name] = estimate.draw(name), [f"{name}: {estimate.source}"]
        draws["n_storages"], sources["n_storages"] = draws["n_nodes"], sources["n_nodes"]
        if self.is_remote:
            draws["n_storages"] = draws["remote"] = np.ones(N_DRAWS)
            sources["n_storages"] = []
        for formula in FORMULAS:
            values = Values(draws)
            try:
                found = formula.function(values)
            except KeyError:
                continue
            if not formula.only_with or formula.only_with in draws:
                draws[formula.name] = found
                sources[formula.name] = list(dict.fromkeys(each for name in values.used for each in sources[name]))

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
