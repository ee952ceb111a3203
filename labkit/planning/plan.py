"""`lk.plan`: what a training on N GPUs asks of cores, storage and network, and which of them limits it.

Requests in flight follow Little's law, L = rate x time (J. D. C. Little, Operations Research 9, 1961,
https://doi.org/10.1287/opre.9.3.383). The ceilings are those of operational analysis: a resource gives at most its
number of servers / the time that an image holds one, and the whole no more than its scarcest resource (Denning and
Buzen, ACM Computing Surveys 10, 1978, https://doi.org/10.1145/356733.356735). They are upper limits. Where two
resources are equally scarce, times vary and few batches are made ahead, the rate is up to a third lower:
tests/planning/test_plan.py compares them with a simulation.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

from labkit.errors import ArgumentError
from labkit.util.arguments import is_number, require_int, require_positive, require_report

_LITTLE = 0.1  # of the time on a core: a thread that waits no longer for its reads is held up by decoding
_CLOSE = 1.25  # the second ceiling over the first: so close that queues cost


@dataclass(frozen=True)
class Plan:
    """What `plan` predicts. Nothing in it was measured. Printed, it is a page.

    Attributes:
        title: The machines and the rate of their GPUs.
        demand: Images/s that all GPUs together could use.
        needs: What keeps them busy, by name: cores, processes, MB/s, requests.
        ceilings: Resource -> images/s that it gives at most to all GPUs.
        n_images: Of an epoch.
    """

    title: str
    demand: float
    needs: dict[str, float]
    ceilings: dict[str, float]
    n_images: int

    @property
    def images_per_s(self) -> float:
        """Images/s of the training: the smallest ceiling."""
        return min(self.ceilings.values())

    @property
    def bottleneck(self) -> str:
        """The resource with the smallest ceiling."""
        return min(self.ceilings, key=lambda name: self.ceilings[name])

    @property
    def busy_share(self) -> float:
        """Share of the time in which the GPUs train, from 0 to 1."""
        return self.images_per_s / self.demand

    @property
    def epoch_hours(self) -> float:
        return self.n_images / self.images_per_s / 3600

    def __str__(self) -> str:
        first, *others = sorted(self.ceilings.values())
        close = (
            "\nThe two smallest ceilings are close to each other: with few batches ahead and times that vary, the rate "
            "can be a third lower."
        )
        return "\n".join([
            f"{self.title}: the limit is {self.bottleneck}. The GPUs get {_shown(self.images_per_s)} images/s of the "
            f"{_shown(self.demand)} that they could use, train {self.busy_share:.0%} of the time, and an epoch takes "
            f"{_shown(self.epoch_hours)} hours.{close if others and others[0] < _CLOSE * first else ''}",
            "", "Images/s at most",
            *(f"  {name:<34} {_shown(value):>10}" for name, value in sorted(self.ceilings.items(), key=lambda i: i[1])),
            "", "To keep the GPUs busy",
            *(f"  {name:<34} {_shown(value):>10}" for name, value in self.needs.items()),
        ])  # fmt: skip


def _shown(value: float) -> str:
    """Three significant digits, as 57,200 and 0.123."""
    return f"{float(f'{value:.3g}'):,.10g}"


def plan(
    images_per_s: Any,
    *,
    cores_per_node: float,
    cpu_ms_per_image: float | None = None,
    n_gpus: int = 1,
    n_nodes: int = 1,
    batch_size: int | None = None,
    step_cores_per_gpu: float | None = None,
    slowdown: float | None = None,
    gil_us_per_image: float = 0.0,
    processes_per_gpu: int = 1,
    kb_per_image: float = 108.0,
    images_per_request: float = 1.0,
    latency_ms: float = 0.0,
    mb_per_s_per_request: float = math.inf,
    request_cpu_ms: float = 0.0,
    request_gil_ms: float = 0.0,
    requests_in_flight_per_gpu: int | None = None,
    requests_per_s: float = math.inf,
    storage_mb_per_s: float = math.inf,
    network_gbit_per_node: float = math.inf,
    n_images: int = 1_281_167,
) -> Plan:
    """Predict what N GPUs ask of cores, storage and network, and which of these limits their training.

    Every argument is a number that you measured or read somewhere. For a range, plan twice. A limit that is not given
    counts as none. Needs no torch.

    Args:
        images_per_s: Images/s of one GPU whose batches are ready: a number, or what was measured: a `Diagnosis`, a
            `WatchReport`, or the path of what `labkit watch --json` wrote. These also give the step's cores and the
            core time of an image.
        cores_per_node: Usable cores of a machine, in the unit in which `cpu_ms_per_image` was measured: cores, or
            hyperthreads, as most vCPUs are.
        cpu_ms_per_image: Milliseconds of a core that an image takes in the loader, storage not included.
        n_gpus, n_nodes: GPUs in all, and the machines that share them evenly.
        batch_size: Images of a batch. Needed for the reports of a watch, which counts batches.
        step_cores_per_gpu: Cores that launch the step. Default: as measured, else 1.
        slowdown: Core time with all cores busy over core time with one. Default: 1.1, or 1 for a watched training.
        gil_us_per_image: Microseconds under Python's lock, as `labkit.measure.gil.gil_us_per_image` measures them.
        processes_per_gpu: Processes that load, each with a lock of its own.
        kb_per_image: An image in storage, in 1e3 bytes. Default: the mean of ImageNet's training set, 138 GB in 1.28
            million files.
        images_per_request: 1 for single objects; more for shards that are read in ranges.
        latency_ms: From a request to its first byte.
        mb_per_s_per_request: How fast the bytes of one request come.
        request_cpu_ms, request_gil_ms: Core time of the client for a request, and how much of it is under the lock.
        requests_in_flight_per_gpu: Requests that are sent and not yet answered, no more than the images of the batches
            that are made ahead. Default: one for each core, which reads and then decodes.
        requests_per_s, storage_mb_per_s: What the storage gives, to all machines together.
        network_gbit_per_node: The network of a machine, if images come over it.
        n_images: Of an epoch. Default: ImageNet's.

    >>> print(lk.plan(2500, n_gpus=8, cores_per_node=32, cpu_ms_per_image=2.1).bottleneck)
    the cores

    Raises:
        FileNotFoundError: no such report.
        ValueError: a number that is not above 0, or missing; a report without it.

    Taught in: notebooks/14_at_scale.ipynb
    """
    counts = {
        "n_gpus": n_gpus, "n_nodes": n_nodes, "processes_per_gpu": processes_per_gpu, "n_images": n_images,
        "batch_size": batch_size, "requests_in_flight_per_gpu": requests_in_flight_per_gpu,
    }  # fmt: skip
    positive = {
        "cores_per_node": cores_per_node, "cpu_ms_per_image": cpu_ms_per_image, "slowdown": slowdown,
        "kb_per_image": kb_per_image, "images_per_request": images_per_request,
    }  # fmt: skip
    or_zero = {
        "step_cores_per_gpu": step_cores_per_gpu, "gil_us_per_image": gil_us_per_image, "latency_ms": latency_ms,
        "request_cpu_ms": request_cpu_ms, "request_gil_ms": request_gil_ms,
    }  # fmt: skip
    or_none = {
        "mb_per_s_per_request": mb_per_s_per_request, "requests_per_s": requests_per_s,
        "storage_mb_per_s": storage_mb_per_s, "network_gbit_per_node": network_gbit_per_node,
    }  # fmt: skip
    for name, count in counts.items():
        if count is not None:
            require_int(name, count)
    for name, value in {**positive, **or_zero, **or_none}.items():
        if value is not None and not (value == 0 and name in or_zero) and not (value == math.inf and name in or_none):
            require_positive(name, value)
    if n_gpus % n_nodes:
        raise ArgumentError(f"n_gpus must be a multiple of n_nodes, got {n_gpus} GPUs on {n_nodes} nodes")
    seen = {}
    if not is_number(images_per_s):
        seen = _measured(images_per_s, batch_size)
        images_per_s = seen["images_per_s"]
    rate = require_positive("images_per_s", images_per_s)
    if cpu_ms_per_image is None and "cpu_ms_per_image" not in seen:
        raise ArgumentError(
            "cpu_ms_per_image is not known: enter the milliseconds of a core that an image takes; notebook 14 measures "
            "them, and so does lk.diagnose(loader, step) of a DataLoader"
        )
    image_ms = cpu_ms_per_image or seen["cpu_ms_per_image"]
    step_cores = seen.get("step_cores", 1.0) if step_cores_per_gpu is None else step_cores_per_gpu
    slower = slowdown or seen.get("slowdown", 1.1)

    demand, gpus_per_node = rate * n_gpus, n_gpus / n_nodes
    request_ms = latency_ms + images_per_request * kb_per_image / mb_per_s_per_request
    busy_ms = (image_ms + request_cpu_ms / images_per_request) * slower
    lock_us = gil_us_per_image + 1e3 * request_gil_ms / images_per_request
    mb_per_s = demand * kb_per_image / 1e3
    cores_per_gpu = rate * busy_ms / 1e3 + step_cores
    in_flight = demand / images_per_request * request_ms / 1e3  # Little's law
    # The system shares cores evenly, so loading gets at least half of them.
    loading_cores = max(cores_per_node - step_cores * gpus_per_node, cores_per_node / 2)
    ceilings = {"the GPUs": demand, "the cores": n_nodes * loading_cores * 1e3 / busy_ms}
    if lock_us:
        ceilings["Python's lock"] = n_gpus * processes_per_gpu * 1e6 / lock_us
    if requests_in_flight_per_gpu and request_ms:
        ceilings["the requests in flight"] = n_gpus * requests_in_flight_per_gpu * images_per_request * 1e3 / request_ms
    elif request_ms:  # a thread on each core reads, and then decodes: it waits for the one and works on the other
        threads, wait_ms = max(n_gpus, n_nodes * loading_cores), request_ms / images_per_request
        waits = "the cores" if wait_ms < _LITTLE * busy_ms else "the requests in flight"
        ceilings[waits] = min(threads * 1e3 / (wait_ms + busy_ms), ceilings["the cores"])
    limits = {
        "the storage's requests per second": requests_per_s * images_per_request,
        "the storage's MB per second": storage_mb_per_s * 1e3 / kb_per_image,
        "the network": n_nodes * network_gbit_per_node / 8 * 1e6 / kb_per_image,
    }
    ceilings |= {name: value for name, value in limits.items() if value < math.inf}
    needs = {
        "cores_per_gpu": cores_per_gpu,
        "cores_per_node": cores_per_gpu * gpus_per_node,
        "processes_per_gpu": max(1, math.ceil(rate * lock_us / 1e6)),
        "mb_per_s": mb_per_s,
        "gbit_per_s_per_node": mb_per_s / n_nodes * 8 / 1e3,
        "requests_per_s": demand / images_per_request,
        "requests_in_flight": in_flight,
        "requests_in_flight_per_gpu": in_flight / n_gpus,
        "dataset_gb": n_images * kb_per_image / 1e6,
    }
    machines = f"{n_gpus} GPU{'s' * (n_gpus > 1)} on {n_nodes} node{'s' * (n_nodes > 1)}"
    return Plan(f"{machines}, {_shown(rate)} images/s a GPU", demand, needs, ceilings, n_images)


def _measured(seen: Any, batch_size: int | None) -> dict[str, float]:
    """The rate of a GPU and, as far as they were seen, the step's cores and the core time of an image.

    Args:
        seen: A `Diagnosis`, a `WatchReport`, or the path of what `labkit watch --json` wrote.
        batch_size: Images of a batch, which a watch does not know.
    """
    found: dict[str, float] = {}
    if hasattr(seen, "frame"):
        n_images, costs = float(seen.frame["batch_size"].iloc[0]), vars(seen.costs)
        found["images_per_s"] = float(seen.frame.loc[seen.frame["variant"] == "step", "images_per_s"].median())
        if not found["images_per_s"] > 0:
            raise ArgumentError("the diagnosis counted no images in its batches: pass count= to lk.diagnose")
    else:
        if not (is_report := hasattr(seen, "to_dict")) and not isinstance(seen, str | os.PathLike):
            raise ArgumentError(
                "images_per_s must be a number > 0, what lk.diagnose or lk.watch gives, or the path of what `labkit "
                f"watch --json` wrote, got {seen!r:.100}"
            )
        report = seen.to_dict() if is_report else require_report("images_per_s", seen, "costs_s")
        if batch_size is None:
            raise ArgumentError("batch_size is missing: a watch counts batches, so enter the images of one")
        n_images, costs = float(batch_size), report["costs_s"]
        found = {"images_per_s": n_images / costs["step"], "slowdown": 1.0}  # the training ran at the same time
    if costs.get("step_cpu"):
        found["step_cores"] = costs["step_cpu"] / costs["step"]
    if (cpu_s := (costs.get("making") or 0.0) * (1 - costs["waiting"])) > 0:
        found["cpu_ms_per_image"] = 1e3 * cpu_s / n_images
    return found
