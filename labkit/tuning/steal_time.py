"""Time that the host of a virtual machine gives to others: who would run then neither computes nor waits for data."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all cores together, since the machine started.

    busy_s: In which they ran something.
    stolen_s: In which they had something to run, and the host ran something else in their place.
    """

    busy_s: float
    stolen_s: float

    def with_stolen(self, cpu_s: float) -> float:
        """Processor seconds used since then, with their part of what was stolen: as large as their part of the work."""
        now = core_time()
        busy_s = max(now.busy_s - self.busy_s, cpu_s)  # the kernel counts both by different clocks
        stolen_s = max(0.0, now.stolen_s - self.stolen_s)
        return cpu_s + (stolen_s * cpu_s / busy_s if busy_s > 0 else 0.0)


def core_time() -> CoreTime:
    """Of this machine, by its kernel; nothing where it does not tell: not Linux, or a host that hides what it takes.

    Source: psutil.cpu_times, /proc/stat on Linux.
    """
    try:
        times = psutil.cpu_times()
    except (OSError, ValueError):  # a container that hides them
        return CoreTime(0.0, 0.0)
    busy_s = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    return CoreTime(busy_s, getattr(times, "steal", 0.0))
