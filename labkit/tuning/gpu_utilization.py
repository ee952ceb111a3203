"""How busy the GPU is, according to its driver."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

_INTERVAL_S = 0.1


@contextmanager
def gpu_utilization() -> Iterator[list[float]]:
    """Sample the current CUDA device in a thread while the `with` block runs; no samples if NVML does not answer.

    A sample is the share of the time in which a kernel ran, 0 to 1. A kernel that uses one of a hundred multiprocessors
    counts in full: low means idle, high does not mean well used.

    Source: nvmlDeviceGetUtilizationRates, via torch.cuda.utilization.
    """
    samples, ended = [], threading.Event()

    def sample() -> None:
        with suppress(Exception):  # NVML, or its Python package, is missing
            while not ended.wait(_INTERVAL_S):
                samples.append(torch.cuda.utilization() / 100)

    thread = threading.Thread(target=sample, name="labkit-gpu-utilization", daemon=True)
    if torch.cuda.is_initialized():
        thread.start()
    try:
        yield samples
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
