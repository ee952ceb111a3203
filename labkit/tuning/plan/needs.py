"""The formulas of a plan, first part: what it takes to keep the GPUs busy.

Requests in flight follow Little's law, L = rate x time (J. D. C. Little, Operations Research 9, 1961,
https://doi.org/10.1287/opre.9.3.383).
"""

import numpy as np

from labkit.tuning.plan.line import Draws, Line, line

NEEDS: list[Line] = []


@line(NEEDS, "need", "images, all GPUs", "images/s")
def demand(images_per_s_per_gpu: Draws, n_gpus: Draws) -> Draws:
    """images/s of a GPU x GPUs"""
    return images_per_s_per_gpu * n_gpus


@line(NEEDS, "need", "GPUs a node", "")
def gpus_per_node(n_gpus: Draws, n_nodes: Draws) -> Draws:
    """GPUs / nodes"""
    return n_gpus / n_nodes


@line(NEEDS, "need", "core time of an image, all cores busy", "ms")
def busy_cpu_ms(cpu_ms_per_image: Draws, slowdown: Draws) -> Draws:
    """core time of an image x slowdown with all cores busy"""
    return cpu_ms_per_image * slowdown


@line(NEEDS, "need", "cores a GPU", "cores")
def cores_per_gpu(images_per_s_per_gpu: Draws, busy_cpu_ms: Draws, step_cores_per_gpu: Draws) -> Draws:
    """images/s of a GPU x core time of an image + cores of its step"""
    return images_per_s_per_gpu * busy_cpu_ms / 1e3 + step_cores_per_gpu


@line(NEEDS, "need", "cores a node", "cores")
def cores_needed_per_node(cores_per_gpu: Draws, gpus_per_node: Draws) -> Draws:
    """cores a GPU x GPUs a node"""
    return cores_per_gpu * gpus_per_node


@line(NEEDS, "need", "loader processes a GPU", "processes")
def processes_needed(images_per_s_per_gpu: Draws, gil_us_per_image: Draws) -> Draws:
    """images/s of a GPU x time under Python's lock, rounded up"""
    return np.maximum(1, np.ceil(images_per_s_per_gpu * gil_us_per_image / 1e6))


@line(NEEDS, "need", "from storage, a node", "MB/s")
def mb_per_s_per_node(images_per_s_per_gpu: Draws, gpus_per_node: Draws, kb_per_image: Draws) -> Draws:
    """images/s of a GPU x GPUs a node x KB of an image"""
    return images_per_s_per_gpu * gpus_per_node * kb_per_image / 1e3


@line(NEEDS, "need", "network, a node", "Gbit/s", is_remote=True)
def gbit_per_s_per_node(mb_per_s_per_node: Draws) -> Draws:
    """MB/s of a node x 8 bits; gradients not included"""
    return mb_per_s_per_node * 8 / 1e3


@line(NEEDS, "need", "network, in all", "Gbit/s", is_remote=True)
def gbit_per_s(gbit_per_s_per_node: Draws, n_nodes: Draws) -> Draws:
    """Gbit/s of a node x nodes"""
    return gbit_per_s_per_node * n_nodes


@line(NEEDS, "need", "images a request", "images")
def images_per_request(kb_per_image: Draws, request_mb: Draws | None = None) -> Draws:
    """MB of a request / KB of an image, at least 1; without shards 1"""
    return np.ones_like(kb_per_image) if request_mb is None else np.maximum(1, request_mb * 1e3 / kb_per_image)


@line(NEEDS, "need", "requests, in all", "requests/s")
def requests_needed_per_s(demand: Draws, images_per_request: Draws) -> Draws:
    """images/s / images a request"""
    return demand / images_per_request


@line(NEEDS, "need", "prefixes", "prefixes", is_remote=True)
def prefixes_needed(requests_needed_per_s: Draws, requests_per_s: Draws, n_prefixes: Draws) -> Draws:
    """requests/s / requests/s of a prefix, rounded up"""
    return np.ceil(requests_needed_per_s / requests_per_s)


@line(NEEDS, "need", "time of a request", "ms")
def request_ms(
    latency_ms: Draws, mb_per_s_per_request: Draws, images_per_request: Draws, kb_per_image: Draws,
) -> Draws:  # fmt: skip
    """latency + KB of an image x images a request / MB/s of a request"""
    return latency_ms + images_per_request * kb_per_image / mb_per_s_per_request


@line(NEEDS, "need", "requests in flight, in all", "requests")
def in_flight_needed(requests_needed_per_s: Draws, request_ms: Draws) -> Draws:
    """Little's law: requests/s x time of a request"""
    return requests_needed_per_s * request_ms / 1e3


@line(NEEDS, "need", "requests in flight, a GPU", "requests")
def in_flight_needed_per_gpu(in_flight_needed: Draws, n_gpus: Draws) -> Draws:
    """requests in flight / GPUs"""
    return in_flight_needed / n_gpus


@line(NEEDS, "need", "KB of an image on the bus", "KB")
def batch_kb_per_image(crop_size: Draws, bytes_per_value: Draws) -> Draws:
    """crop size squared x 3 colours x bytes of a value"""
    return crop_size**2 * 3 * bytes_per_value / 1e3


@line(NEEDS, "need", "PCIe, a GPU", "GB/s")
def pcie_needed_gb_per_s(images_per_s_per_gpu: Draws, batch_kb_per_image: Draws) -> Draws:
    """images/s of a GPU x KB of an image on the bus"""
    return images_per_s_per_gpu * batch_kb_per_image / 1e6


@line(NEEDS, "need", "memory of the loaders, a node", "GB")
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


@line(NEEDS, "need", "disk for the images", "GB")
def dataset_gb(n_images: Draws, kb_per_image: Draws) -> Draws:
    """images x KB of an image"""
    return n_images * kb_per_image / 1e6


@line(NEEDS, "need", "disk for prepared pixels", "GB")
def pixels_gb(n_images: Draws, pixel_kb_per_image: Draws) -> Draws:
    """images x KB of an image's pixels"""
    return n_images * pixel_kb_per_image / 1e6


@line(NEEDS, "need", "shards", "shards")
def shards(dataset_gb: Draws, shard_mb: Draws) -> Draws:
    """GB of all images / MB of a shard, rounded up"""
    return np.ceil(dataset_gb * 1e3 / shard_mb)


@line(NEEDS, "need", "shards at least", "shards")
def fewest_shards(
    n_gpus: Draws, processes_per_gpu: Draws, shard_mb: Draws, processes_needed: Draws | None = None,
) -> Draws:  # fmt: skip
    """GPUs x loader processes: each reads a shard of its own"""
    return n_gpus * (processes_per_gpu if processes_needed is None else np.maximum(processes_per_gpu, processes_needed))
