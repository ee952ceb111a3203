"""The formulas of a plan, second part: what each resource can give at most, and what comes of it.

The ceilings are those of operational analysis: a resource gives at most its number of servers / the time that an image
holds one, and the whole no more than its scarcest resource (Denning and Buzen, ACM Computing Surveys 10, 1978,
https://doi.org/10.1145/356733.356735). They are upper limits. Where two resources are equally scarce,
times vary and few batches are made ahead, the rate is up to a third lower: tests/tuning/plan/test_ceilings.py
compares them with a simulation.
"""

import numpy as np

from labkit.tuning.plan.line import Draws, Line, line
from labkit.tuning.plan.needs import NEEDS

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

_OWN: list[Line] = []


@line(_OWN, "ceiling", "the GPUs", "images/s")
def gpu_ceiling(demand: Draws) -> Draws:
    """what the GPUs ask for"""
    return demand


@line(_OWN, "need", "cores left for loading, a node", "cores")
def loading_cores_per_node(cores_per_node: Draws, step_cores_per_gpu: Draws, gpus_per_node: Draws) -> Draws:
    """cores a node - cores of the steps; at least half, since the system shares cores evenly"""
    return np.maximum(cores_per_node - step_cores_per_gpu * gpus_per_node, cores_per_node / 2)


@line(_OWN, "ceiling", "the cores", "images/s")
def core_ceiling(loading_cores_per_node: Draws, n_nodes: Draws, busy_cpu_ms: Draws) -> Draws:
    """cores for loading x nodes / core time of an image"""
    return loading_cores_per_node * n_nodes * 1e3 / busy_cpu_ms


@line(_OWN, "ceiling", "Python's lock", "images/s")
def lock_ceiling(n_gpus: Draws, processes_per_gpu: Draws, gil_us_per_image: Draws) -> Draws:
    """GPUs x loader processes a GPU / time under Python's lock"""
    return n_gpus * processes_per_gpu * 1e6 / gil_us_per_image


@line(_OWN, "ceiling", "the PCIe bus", "images/s")
def pcie_ceiling(n_gpus: Draws, pcie_gb_per_s: Draws, batch_kb_per_image: Draws) -> Draws:
    """GPUs x GB/s of a bus / KB of an image on the bus"""
    return n_gpus * pcie_gb_per_s * 1e6 / batch_kb_per_image


@line(_OWN, "ceiling", "the network", "images/s", is_remote=True)
def network_ceiling(n_nodes: Draws, network_gbit_per_node: Draws, kb_per_image: Draws) -> Draws:
    """nodes x Gbit/s of a node / 8 bits / KB of an image"""
    return n_nodes * network_gbit_per_node / 8 * 1e6 / kb_per_image


@line(_OWN, "ceiling", "the storage's requests per second", "images/s")
def request_rate_ceiling(
    requests_per_s: Draws, images_per_request: Draws, n_storages: Draws, n_prefixes: Draws | float = 1.0,
) -> Draws:  # fmt: skip
    """requests/s x images a request x storages (nodes, if local; prefixes, if an object store)"""
    return requests_per_s * images_per_request * n_storages * n_prefixes


@line(_OWN, "ceiling", "the storage's MB per second", "images/s")
def bandwidth_ceiling(storage_mb_per_s: Draws, kb_per_image: Draws, n_storages: Draws) -> Draws:
    """MB/s x storages / KB of an image"""
    return storage_mb_per_s * n_storages * 1e3 / kb_per_image


@line(_OWN, "need", "requests in flight that there are, a GPU", "requests")
def in_flight_per_gpu(
    loading_cores_per_node: Draws, gpus_per_node: Draws, batch_size: Draws, batches_ahead: Draws,
    requests_in_flight_per_gpu: Draws | None = None, request_mb: Draws | None = None,
) -> Draws:  # fmt: skip
    """as given, else a thread a core; without shards at most the images of the batches ahead of the one in use"""
    threads = np.maximum(1, loading_cores_per_node) / gpus_per_node
    requests = threads if requests_in_flight_per_gpu is None else requests_in_flight_per_gpu
    return np.minimum(requests, (batches_ahead - 1) * batch_size) if request_mb is None else requests


@line(_OWN, "ceiling", "the requests in flight", "images/s")
def in_flight_ceiling(
    in_flight_per_gpu: Draws, n_gpus: Draws, request_ms: Draws, images_per_request: Draws, busy_cpu_ms: Draws,
    requests_in_flight_per_gpu: Draws | None = None,
) -> Draws:  # fmt: skip
    """requests in flight x images a request / time of a request; a thread a core reads and then decodes"""
    decoding_ms = images_per_request * busy_cpu_ms if requests_in_flight_per_gpu is None else 0.0
    return n_gpus * in_flight_per_gpu * images_per_request * 1e3 / (request_ms + decoding_ms)


@line(_OWN, "result", "training", "images/s")
def images_per_s(
    gpu_ceiling: Draws, core_ceiling: Draws, pcie_ceiling: Draws, lock_ceiling: Draws | None = None,
    network_ceiling: Draws | None = None, request_rate_ceiling: Draws | None = None,
    bandwidth_ceiling: Draws | None = None, in_flight_ceiling: Draws | None = None,
) -> Draws:  # fmt: skip
    """the smallest ceiling"""
    optional = (lock_ceiling, network_ceiling, request_rate_ceiling, bandwidth_ceiling, in_flight_ceiling)
    return np.minimum.reduce([gpu_ceiling, core_ceiling, pcie_ceiling, *(c for c in optional if c is not None)])


@line(_OWN, "result", "the GPUs' time that they train", "of 1")
def busy_share(images_per_s: Draws, demand: Draws) -> Draws:
    """images/s / what the GPUs ask for"""
    return images_per_s / demand


@line(_OWN, "result", "an epoch", "hours")
def epoch_hours(n_images: Draws, images_per_s: Draws) -> Draws:
    """images / images/s"""
    return n_images / images_per_s / 3600


@line(_OWN, "result", "an epoch if data were free", "hours")
def fed_epoch_hours(n_images: Draws, demand: Draws) -> Draws:
    """images / what the GPUs ask for"""
    return n_images / demand / 3600


@line(_OWN, "result", "GPUs, an epoch", "of your currency")
def gpu_cost(epoch_hours: Draws, n_gpus: Draws, price_per_gpu_hour: Draws) -> Draws:
    """hours x GPUs x price of a GPU hour"""
    return epoch_hours * n_gpus * price_per_gpu_hour


@line(_OWN, "result", "requests, an epoch", "of your currency")
def request_cost(n_images: Draws, images_per_request: Draws, price_per_1000_requests: Draws) -> Draws:
    """images / images a request / 1000 x price of 1000 requests"""
    return n_images / images_per_request / 1e3 * price_per_1000_requests


LINES = NEEDS + _OWN
