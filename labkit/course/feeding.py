"""Ways to feed a training step, on a simulated device: what each costs on top of its longest part."""

import math
from dataclasses import dataclass
from itertools import chain, repeat

import pandas as pd
import torch

from labkit.simulation.context import SimulatedLoader, simulated_cuda
from labkit.simulation.simulated_device import SimulatedDevice
from labkit.simulation.timeline import trace
from labkit.util.arguments import require_choice, require_int, require_positive

# Way -> is the batch in page-locked memory, and how `course.trace` copies it.
WAYS = {
    "pageable": (False, "blocking"),
    "pinned": (True, "blocking"),
    "pinned, non_blocking": (True, "non_blocking"),
    "prefetched": (True, "prefetch"),
}
_N_STEPS = 8


@dataclass(frozen=True)
class Feeding:
    """A training loop to simulate.

    Args:
        step_s: Seconds that the device computes for a batch.
        load_s: Seconds that one worker takes for a batch.
        num_workers: 0: the loop loads.
        batch_bytes: What is copied to the device for a batch.
        pcie_bytes_per_s: Rate of a copy from page-locked memory.
        staging_bytes_per_s: At which the host itself copies pageable memory, into the driver's buffer.
    """

    step_s: float
    load_s: float
    num_workers: int = 4
    batch_bytes: int = 64 * 3 * 224 * 224
    pcie_bytes_per_s: float = 25e9
    staging_bytes_per_s: float = 8e9

    def __post_init__(self) -> None:
        for name in ("step_s", "load_s", "pcie_bytes_per_s", "staging_bytes_per_s"):
            require_positive(name, getattr(self, name))
        require_int("batch_bytes", self.batch_bytes)
        require_int("num_workers", self.num_workers, minimum=0)

    @property
    def parts_s(self) -> dict[str, float]:
        """What each part would take per batch if it were alone."""
        load_s = self.load_s / max(1, self.num_workers)
        return {"load": load_s, "copy": self.batch_bytes / self.pcie_bytes_per_s, "compute": self.step_s}


def simulate_feeding(way: str, feeding: Feeding, *, n_steps: int = _N_STEPS) -> pd.DataFrame:
    """Run training steps on a simulated device, fed in one of `WAYS`; the step is a kernel of a stated time.

    The loop is that of a real device: `course.trace` and `lk.CUDAPrefetcher`, unchanged.

    Returns:
        Spans as of `course.trace`, with `simulated`; `plot_timeline` draws them, `step_seconds` sums them up.

    Raises:
        ValueError: unknown way.

    Taught in: notebooks/07_cuda_prefetch.ipynb
    """
    return _simulate(way, feeding, n_steps, warmup_s=feeding.step_s)


def _simulate(way: str, feeding: Feeding, n_steps: int, *, warmup_s: float) -> pd.DataFrame:
    """Simulate after two steps of `warmup_s` seconds each that are not recorded; workers load meanwhile."""
    require_choice("way", way, WAYS)
    is_pinned, copy = WAYS[way]
    n_bytes = min(feeding.batch_bytes, 4096)  # stand for the whole batch, at rates to match
    part = n_bytes / feeding.batch_bytes
    device = SimulatedDevice(
        pcie_bytes_per_s=part * feeding.pcie_bytes_per_s, staging_bytes_per_s=part * feeding.staging_bytes_per_s
    )
    with simulated_cuda(device):
        batch = torch.zeros(n_bytes, dtype=torch.uint8)
        batch = batch.pin_memory() if is_pinned else batch
        n_batches = n_steps + 3  # two warm up, and the prefetcher has the next one ahead in the last step, too
        loader = SimulatedLoader(
            lambda number: batch, n_batches, load_s=feeding.load_s, num_workers=feeding.num_workers
        )
        seconds = chain([warmup_s] * 2, repeat(feeding.step_s))
        return trace(
            loader,
            lambda batch: torch.cuda._sleep(round(next(seconds) * device.clock_hz)),
            n_batches=n_steps,
            device="cuda",
            copy=copy,
        )


def step_seconds(spans: pd.DataFrame) -> float:
    """Seconds from the end of one step's computing to the end of the next, over the later half of a timeline."""
    ends = spans.loc[spans["kind"] == "compute", "end_s"].sort_values().to_numpy()
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


def feeding_times(feeding: Feeding, n_steps: int = _N_STEPS) -> pd.DataFrame:
    """Each way's `ms_per_step`, and how many times as long as the longest part it is.

    Args:
        feeding: The loop.
        n_steps: To simulate, of which the later half counts; rounded up, so that this half is whole rounds of the
            workers. Workers that are slower than the step finish together, so batches come in groups.
    """
    workers = max(1, feeding.num_workers)
    n_steps = 2 * workers * math.ceil(n_steps / (2 * workers))
    longest_s = max(feeding.parts_s.values())
    # Batches that workers load during long steps to warm up would be a lead that lasts into the half that counts.
    seconds = {way: step_seconds(_simulate(way, feeding, n_steps, warmup_s=0.0)) for way in WAYS}
    frame = pd.DataFrame({"ms_per_step": {way: 1e3 * s for way, s in seconds.items()}})
    return frame.rename_axis("way").assign(over_longest=frame["ms_per_step"] / (1e3 * longest_s), simulated=True)
