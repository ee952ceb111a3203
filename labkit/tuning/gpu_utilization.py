"""How busy the GPU is, according to its driver."""

import sys
import threading
from statistics import fmean

_INTERVAL_S = 0.1


class GpuUtilization:
    """Samples the current CUDA device in a thread while the `with` block runs.

    Attributes:
        share: Mean share of the time in which a kernel ran, 0 to 1, or None if NVML does not answer. A kernel that
            uses one of a hundred multiprocessors counts in full: low means idle, high does not mean well used.

    Source: nvmlDeviceGetUtilizationRates, via torch.cuda.utilization.
    """

    share: float | None = None

    def __enter__(self) -> "GpuUtilization":
        self._samples: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        torch = sys.modules.get("torch")
        self._query = torch.cuda.utilization if torch is not None and torch.cuda.is_initialized() else None
        if self._query:
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._samples:
            self.share = fmean(self._samples) / 100

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            try:
                self._samples.append(self._query())
            except Exception:  # NVML, or its Python package, is missing
                return
