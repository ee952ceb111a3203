"""The formulas of a plan: what it takes to keep the GPUs busy, what each resource gives at most, and what follows.

A formula is a function whose parameters name what it uses. Every input is an `Estimate`, a number with its uncertainty
and source, and random draws carry them through all formulas. `loader_costs` measures what an image costs here.

Requests in flight follow Little's law, L = rate x time (J. D. C. Little, Operations Research 9, 1961,
https://doi.org/10.1287/opre.9.3.383). The ceilings are those of operational analysis: a resource gives at most its
number of servers / the time that an image holds one, and the whole no more than its scarcest resource (Denning and
Buzen, ACM Computing Surveys 10, 1978, https://doi.org/10.1145/356733.356735). They are upper limits. Where two
resources are equally scarce, times vary and few batches are made ahead, the rate is up to a third lower:
tests/tuning/plan/test_ceilings.py compares them with a simulation.
"""

import inspect
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np

from labkit.errors import ArgumentError
from labkit.util.arguments import require_choice, require_int
from labkit.util.files import write_atomic
from labkit.util.machine import env_id
from labkit.util.pictures import encode_image

Draws = np.ndarray
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Formula:
    """A quantity that is computed.

    Args:
        group: `need` (to keep the GPUs busy), `ceiling` (images/s at most) or `result`.
        label: Its name in a plan.
        unit: Of its values.
        function: Takes and gives arrays; its docstring is the formula as a plan shows it, and its parameters name
            inputs and earlier lines. One that has a default may be unknown.
        is_remote: Has a meaning only if images come over a network.
    """

    group: str
    label: str
    unit: str
    function: Callable[..., Any]
    is_remote: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def formula(self) -> str:
        return " ".join((inspect.getdoc(self.function) or "").split())

    @cached_property
    def uses(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    @cached_property
    def needs(self) -> set[str]:
        parameters = inspect.signature(self.function).parameters
        return {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}


def compute(lines: Iterable[Formula], draws: dict[str, Draws]) -> dict[str, Draws]:
    """The draws, and after them those of every line whose inputs are known."""
    found = dict(draws)
    for line in lines:
        if line.needs <= set(found):
            found[line.name] = np.asarray(line.function(**{name: found[name] for name in line.uses if name in found}))
    return found


def formula(lines: list[Formula], group: str, label: str, unit: str, *, is_remote: bool = False) -> Callable[[_F], _F]:
    """Add the function that follows to `lines`."""

    def add(function: _F) -> _F:
        lines.append(Formula(group, label, unit, function, is_remote))
        return function

    return add


KINDS = ("measured here", "entered", "published", "theory", "assumed")
N_DRAWS = 4001  # odd: one of them is the median
QUANTILE = 1.959964  # of the normal distribution: 95 % lie within so many standard deviations


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
        interval = self.interval
        is_ordered = all(map(_is_finite, interval)) and interval[0] <= self.value <= interval[1]
        if not is_ordered or min(interval) < 0 or (interval[0] == 0 and interval[1] > 0):
            raise ArgumentError(
                "an estimate must be one number >= 0, or numbers 0 < low <= value <= high, "
                f"got low={self.low!r}, value={self.value!r}, high={self.high!r}"
            )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)

    def times(self, factor: float, source: str) -> "Estimate":
        """The same in another unit, or by another rule, which `source` tells."""
        low, high = self.interval
        return Estimate(self.value * factor, low * factor, high * factor, source, self.kind)

    def draw(self, name: str) -> np.ndarray:
        """Values, log-normal on either side of the median: `N_DRAWS` evenly spread ones, in an order drawn by `name`.

        So two plans that differ in one input share the draws of all others.

        Source: M. D. McKay and others, Technometrics 21, 1979 (Latin hypercube sampling),
        https://doi.org/10.1080/00401706.1979.10489755
        """
        if self.interval == (self.value, self.value):
            return np.full(N_DRAWS, float(self.value))
        drawn = np.random.default_rng(zlib.crc32(name.encode())).permutation(deviates())
        below, above = (abs(math.log(end / self.value)) / QUANTILE for end in self.interval)
        return self.value * np.exp(drawn * np.where(drawn < 0, below, above))


@cache
def deviates() -> np.ndarray:
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
    """With three digits that count, as 57,200 and 0.123."""
    return f"{float(f'{value:.3g}'):,.10g}"


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
                raise ArgumentError(f"unknown data {', '.join(set(costs) - set(DATA))}")
            return cls(costs, found["notes"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"{path} holds no costs of labkit.loader_costs: {error}") from error


def loader_costs(source: Any, *, n_images: int = 128, rounds: int = 5, gil: bool = True) -> LoaderCosts:
    """Measure here what an image costs `lk.BatchLoader` on one thread: as it is, as a small JPEG, as prepared pixels.

    A sample of the images is read into memory once, so that storage is not part of it. Core time is that of the process
    in `rounds` interleaved rounds of `compare`; time under Python's lock is `gil_us_per_image`'s, which
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
    from labkit.data.pixels import PixelStore
    from labkit.data.remote import open_store
    from labkit.data.stores import Store
    from labkit.errors import GilError
    from labkit.util.files import ScratchFolder

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
            raise ArgumentError(f"{store!r} holds no images")
        chosen = np.unique(np.linspace(0, len(keys) - 1, min(n_images, len(keys))).round().astype(int))
        return cls({keys[number]: store.read(keys[number]) for number in chosen.tolist()})

    def small(self) -> "_Sample":
        """The same as JPEGs whose shorter side has 256 pixels."""
        from PIL import Image

        from labkit.data.decode import decode
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
    from labkit.loading.batch_loader import BatchLoader

    return BatchLoader(of, num_threads=1, pin_memory=False)


def _same(loader: Any) -> Any:
    return loader


def _core_times(stored: dict[str, Any], rounds: int) -> dict[str, dict[str, Estimate]]:
    from labkit.measure.compare import compare
    from labkit.measure.frames import measured_runs

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
    from labkit.measure.gil import gil_us_per_image

    loader = _loader(of)
    us = max(gil_us_per_image(lambda: loader, seconds=_GIL_S), 1e3 * cpu_ms / _N_SAMPLES)  # at least one sample
    share = min(1.0, us / (1e3 * cpu_ms))
    spread = 1.96 * math.sqrt((1 - share) / (share * _N_SAMPLES))
    source = f"labkit.measure.gil.gil_us_per_image: lk.BatchLoader on one thread, on {env_id()}"
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


NEEDS: list[Formula] = []


@formula(NEEDS, "need", "images, all GPUs", "images/s")
def demand(images_per_s_per_gpu: Draws, n_gpus: Draws) -> Draws:
    """images/s of a GPU x GPUs"""
    return images_per_s_per_gpu * n_gpus


@formula(NEEDS, "need", "GPUs a node", "")
def gpus_per_node(n_gpus: Draws, n_nodes: Draws) -> Draws:
    """GPUs / nodes"""
    return n_gpus / n_nodes


@formula(NEEDS, "need", "core time of an image, all cores busy", "ms")
def busy_cpu_ms(cpu_ms_per_image: Draws, slowdown: Draws) -> Draws:
    """core time of an image x slowdown with all cores busy"""
    return cpu_ms_per_image * slowdown


@formula(NEEDS, "need", "cores a GPU", "cores")
def cores_per_gpu(images_per_s_per_gpu: Draws, busy_cpu_ms: Draws, step_cores_per_gpu: Draws) -> Draws:
    """images/s of a GPU x core time of an image + cores of its step"""
    return images_per_s_per_gpu * busy_cpu_ms / 1e3 + step_cores_per_gpu


@formula(NEEDS, "need", "cores a node", "cores")
def cores_needed_per_node(cores_per_gpu: Draws, gpus_per_node: Draws) -> Draws:
    """cores a GPU x GPUs a node"""
    return cores_per_gpu * gpus_per_node


@formula(NEEDS, "need", "loader processes a GPU", "processes")
def processes_needed(images_per_s_per_gpu: Draws, gil_us_per_image: Draws) -> Draws:
    """images/s of a GPU x time under Python's lock, rounded up"""
    return np.maximum(1, np.ceil(images_per_s_per_gpu * gil_us_per_image / 1e6))


@formula(NEEDS, "need", "from storage, a node", "MB/s")
def mb_per_s_per_node(images_per_s_per_gpu: Draws, gpus_per_node: Draws, kb_per_image: Draws) -> Draws:
    """images/s of a GPU x GPUs a node x KB of an image"""
    return images_per_s_per_gpu * gpus_per_node * kb_per_image / 1e3


@formula(NEEDS, "need", "network, a node", "Gbit/s", is_remote=True)
def gbit_per_s_per_node(mb_per_s_per_node: Draws) -> Draws:
    """MB/s of a node x 8 bits; gradients not included"""
    return mb_per_s_per_node * 8 / 1e3


@formula(NEEDS, "need", "network, in all", "Gbit/s", is_remote=True)
def gbit_per_s(gbit_per_s_per_node: Draws, n_nodes: Draws) -> Draws:
    """Gbit/s of a node x nodes"""
    return gbit_per_s_per_node * n_nodes


@formula(NEEDS, "need", "images a request", "images")
def images_per_request(kb_per_image: Draws, request_mb: Draws | None = None) -> Draws:
    """MB of a request / KB of an image, at least 1; without shards 1"""
    return np.ones_like(kb_per_image) if request_mb is None else np.maximum(1, request_mb * 1e3 / kb_per_image)


@formula(NEEDS, "need", "requests, in all", "requests/s")
def requests_needed_per_s(demand: Draws, images_per_request: Draws) -> Draws:
    """images/s / images a request"""
    return demand / images_per_request


@formula(NEEDS, "need", "prefixes", "prefixes", is_remote=True)
def prefixes_needed(requests_needed_per_s: Draws, requests_per_s: Draws, n_prefixes: Draws) -> Draws:
    """requests/s / requests/s of a prefix, rounded up"""
    return np.ceil(requests_needed_per_s / requests_per_s)


@formula(NEEDS, "need", "time of a request", "ms")
def request_ms(
    latency_ms: Draws, mb_per_s_per_request: Draws, images_per_request: Draws, kb_per_image: Draws,
) -> Draws:  # fmt: skip
    """latency + KB of an image x images a request / MB/s of a request"""
    return latency_ms + images_per_request * kb_per_image / mb_per_s_per_request


@formula(NEEDS, "need", "requests in flight, in all", "requests")
def in_flight_needed(requests_needed_per_s: Draws, request_ms: Draws) -> Draws:
    """Little's law: requests/s x time of a request"""
    return requests_needed_per_s * request_ms / 1e3


@formula(NEEDS, "need", "requests in flight, a GPU", "requests")
def in_flight_needed_per_gpu(in_flight_needed: Draws, n_gpus: Draws) -> Draws:
    """requests in flight / GPUs"""
    return in_flight_needed / n_gpus


@formula(NEEDS, "need", "KB of an image on the bus", "KB")
def batch_kb_per_image(crop_size: Draws, bytes_per_value: Draws) -> Draws:
    """crop size squared x 3 colours x bytes of a value"""
    return crop_size**2 * 3 * bytes_per_value / 1e3


@formula(NEEDS, "need", "PCIe, a GPU", "GB/s")
def pcie_needed_gb_per_s(images_per_s_per_gpu: Draws, batch_kb_per_image: Draws) -> Draws:
    """images/s of a GPU x KB of an image on the bus"""
    return images_per_s_per_gpu * batch_kb_per_image / 1e6


@formula(NEEDS, "need", "memory of the loaders, a node", "GB")
def memory_gb(
    gpus_per_node: Draws, batch_kb_per_image: Draws, batch_size: Draws, batches_ahead: Draws,
    processes_per_gpu: Draws, process_gb: Draws, kb_per_image: Draws, images_per_request: Draws,
    processes_needed: Draws | None = None, in_flight_needed_per_gpu: Draws | None = None,
) -> Draws:  # fmt: skip
    """GPUs a node x (batches ahead x batch size x KB on the bus + requests in flight x their KB + processes x GB)"""
    processes = processes_per_gpu if processes_needed is None else np.maximum(processes_per_gpu, processes_needed)
    in_flight = 0.0 if in_flight_needed_per_gpu is None else in_flight_needed_per_gpu
    batches_gb = batches_ahead * batch_size * batch_kb_per_image / 1e6
    return gpus_per_node * (batches_gb + in_flight * images_per_request * kb_per_image / 1e6 + processes * process_gb)


@formula(NEEDS, "need", "disk for the images", "GB")
def dataset_gb(n_images: Draws, kb_per_image: Draws) -> Draws:
    """images x KB of an image"""
    return n_images * kb_per_image / 1e6


@formula(NEEDS, "need", "disk for prepared pixels", "GB")
def pixels_gb(n_images: Draws, pixel_kb_per_image: Draws) -> Draws:
    """images x KB of an image's pixels"""
    return n_images * pixel_kb_per_image / 1e6


@formula(NEEDS, "need", "shards", "shards")
def shards(dataset_gb: Draws, shard_mb: Draws) -> Draws:
    """GB of all images / MB of a shard, rounded up"""
    return np.ceil(dataset_gb * 1e3 / shard_mb)


@formula(NEEDS, "need", "shards at least", "shards")
def fewest_shards(
    n_gpus: Draws, processes_per_gpu: Draws, shard_mb: Draws, processes_needed: Draws | None = None,
) -> Draws:  # fmt: skip
    """GPUs x loader processes: each reads a shard of its own"""
    return n_gpus * (processes_per_gpu if processes_needed is None else np.maximum(processes_per_gpu, processes_needed))


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

_OWN: list[Formula] = []


@formula(_OWN, "ceiling", "the GPUs", "images/s")
def gpu_ceiling(demand: Draws) -> Draws:
    """what the GPUs ask for"""
    return demand


@formula(_OWN, "need", "cores left for loading, a node", "cores")
def loading_cores_per_node(cores_per_node: Draws, step_cores_per_gpu: Draws, gpus_per_node: Draws) -> Draws:
    """cores a node - cores of the steps; at least half, since the system shares cores evenly"""
    return np.maximum(cores_per_node - step_cores_per_gpu * gpus_per_node, cores_per_node / 2)


@formula(_OWN, "ceiling", "the cores", "images/s")
def core_ceiling(loading_cores_per_node: Draws, n_nodes: Draws, busy_cpu_ms: Draws) -> Draws:
    """cores for loading x nodes / core time of an image"""
    return loading_cores_per_node * n_nodes * 1e3 / busy_cpu_ms


@formula(_OWN, "ceiling", "Python's lock", "images/s")
def lock_ceiling(n_gpus: Draws, processes_per_gpu: Draws, gil_us_per_image: Draws) -> Draws:
    """GPUs x loader processes a GPU / time under Python's lock"""
    return n_gpus * processes_per_gpu * 1e6 / gil_us_per_image


@formula(_OWN, "ceiling", "the PCIe bus", "images/s")
def pcie_ceiling(n_gpus: Draws, pcie_gb_per_s: Draws, batch_kb_per_image: Draws) -> Draws:
    """GPUs x GB/s of a bus / KB of an image on the bus"""
    return n_gpus * pcie_gb_per_s * 1e6 / batch_kb_per_image


@formula(_OWN, "ceiling", "the network", "images/s", is_remote=True)
def network_ceiling(n_nodes: Draws, network_gbit_per_node: Draws, kb_per_image: Draws) -> Draws:
    """nodes x Gbit/s of a node / 8 bits / KB of an image"""
    return n_nodes * network_gbit_per_node / 8 * 1e6 / kb_per_image


@formula(_OWN, "ceiling", "the storage's requests per second", "images/s")
def request_rate_ceiling(
    requests_per_s: Draws, images_per_request: Draws, n_storages: Draws, n_prefixes: Draws | float = 1.0,
) -> Draws:  # fmt: skip
    """requests/s x images a request x storages (nodes, if local; prefixes, if an object store)"""
    return requests_per_s * images_per_request * n_storages * n_prefixes


@formula(_OWN, "ceiling", "the storage's MB per second", "images/s")
def bandwidth_ceiling(storage_mb_per_s: Draws, kb_per_image: Draws, n_storages: Draws) -> Draws:
    """MB/s x storages / KB of an image"""
    return storage_mb_per_s * n_storages * 1e3 / kb_per_image


@formula(_OWN, "need", "requests in flight that there are, a GPU", "requests")
def in_flight_per_gpu(
    loading_cores_per_node: Draws, gpus_per_node: Draws, batch_size: Draws, batches_ahead: Draws,
    requests_in_flight_per_gpu: Draws | None = None, request_mb: Draws | None = None,
) -> Draws:  # fmt: skip
    """as given, else a thread a core; without shards at most the images of the batches ahead of the one in use"""
    threads = np.maximum(1, loading_cores_per_node) / gpus_per_node
    requests = threads if requests_in_flight_per_gpu is None else requests_in_flight_per_gpu
    return np.minimum(requests, (batches_ahead - 1) * batch_size) if request_mb is None else requests


@formula(_OWN, "ceiling", "the requests in flight", "images/s")
def in_flight_ceiling(
    in_flight_per_gpu: Draws, n_gpus: Draws, request_ms: Draws, images_per_request: Draws, busy_cpu_ms: Draws,
    requests_in_flight_per_gpu: Draws | None = None,
) -> Draws:  # fmt: skip
    """requests in flight x images a request / time of a request; a thread a core reads and then decodes"""
    decoding_ms = images_per_request * busy_cpu_ms if requests_in_flight_per_gpu is None else 0.0
    return n_gpus * in_flight_per_gpu * images_per_request * 1e3 / (request_ms + decoding_ms)


@formula(_OWN, "result", "training", "images/s")
def images_per_s(
    gpu_ceiling: Draws, core_ceiling: Draws, pcie_ceiling: Draws, lock_ceiling: Draws | None = None,
    network_ceiling: Draws | None = None, request_rate_ceiling: Draws | None = None,
    bandwidth_ceiling: Draws | None = None, in_flight_ceiling: Draws | None = None,
) -> Draws:  # fmt: skip
    """the smallest ceiling"""
    optional = (lock_ceiling, network_ceiling, request_rate_ceiling, bandwidth_ceiling, in_flight_ceiling)
    return np.minimum.reduce([gpu_ceiling, core_ceiling, pcie_ceiling, *(c for c in optional if c is not None)])


@formula(_OWN, "result", "the GPUs' time that they train", "of 1")
def busy_share(images_per_s: Draws, demand: Draws) -> Draws:
    """images/s / what the GPUs ask for"""
    return images_per_s / demand


@formula(_OWN, "result", "an epoch", "hours")
def epoch_hours(n_images: Draws, images_per_s: Draws) -> Draws:
    """images / images/s"""
    return n_images / images_per_s / 3600


@formula(_OWN, "result", "an epoch if data were free", "hours")
def fed_epoch_hours(n_images: Draws, demand: Draws) -> Draws:
    """images / what the GPUs ask for"""
    return n_images / demand / 3600


@formula(_OWN, "result", "GPUs, an epoch", "of your currency")
def gpu_cost(epoch_hours: Draws, n_gpus: Draws, price_per_gpu_hour: Draws) -> Draws:
    """hours x GPUs x price of a GPU hour"""
    return epoch_hours * n_gpus * price_per_gpu_hour


@formula(_OWN, "result", "requests, an epoch", "of your currency")
def request_cost(n_images: Draws, images_per_request: Draws, price_per_1000_requests: Draws) -> Draws:
    """images / images a request / 1000 x price of 1000 requests"""
    return n_images / images_per_request / 1e3 * price_per_1000_requests


LINES = NEEDS + _OWN


_RARE = 0.1  # share of the draws
_FEW_IN_FLIGHT = 1.1  # with less to gain, a thread that reads and decodes is held up by decoding


@dataclass(frozen=True, eq=False)
class Setup:
    """A training and the machines for it.

    inputs: By name, as `INPUTS` lists them.
    storage: Its name.
    is_remote: Images come over the network.
    data: What is stored, one of `DATA`.
    known: Costs by what is stored, as far as they are known.
    """

    inputs: Mapping[str, Estimate]
    storage: str
    is_remote: bool
    data: str
    known: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)

    @property
    def lines(self) -> list[Formula]:
        """Those that have a meaning here and whose inputs are known."""
        return [line for line in LINES if line.name in self.draws]

    @cached_property
    def draws(self) -> dict[str, Draws]:
        """Every input and line -> its draws."""
        draws = {name: estimate.draw(name) for name, estimate in self.inputs.items()}
        draws["n_storages"] = np.ones(N_DRAWS) if self.is_remote else draws["n_nodes"]
        return compute([line for line in LINES if self.is_remote or not line.is_remote], draws)

    @property
    def rate(self) -> Draws:
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
    def to_cure(self) -> str | None:
        """The scarcest resource beside the GPUs; None if hardly any draw has another."""
        others = {name: share for name, share in self.scarcities.items() if name != "gpu_ceiling"}
        return next((name for name, share in others.items() if share >= _RARE), None)

    @property
    def apart(self) -> list[str]:
        """Ceilings that do not follow from others: not that of requests, if the threads that decode send them."""
        decoders_read = "requests_in_flight_per_gpu" not in self.inputs and self.to_cure != "in_flight_ceiling"
        names = [name for name in RESOURCES if name in self.draws]
        return [name for name in names if not (decoders_read and name == "in_flight_ceiling")]

    def next_ceiling(self) -> Draws:
        """Images/s if the resource to cure were without limit."""
        return np.minimum.reduce([self.draws[name] for name in self.apart if name != self.to_cure])
