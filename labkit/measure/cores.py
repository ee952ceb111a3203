"""Time of all cores together: used, and stolen by the host of a virtual machine."""

from dataclasses import dataclass

import psutil

SLOWED = 1.3  # processor seconds with all cores busy, over those of a process alone: the most that was seen


@dataclass(frozen=True)
class CoreTime:
    """Seconds of all cores together, since the machine started.

    busy_s: Running something.
    stolen_s: Ready to run something while the host ran something else.
    """

    busy_s: float
    stolen_s: float

    def __sub__(self, earlier: "CoreTime") -> "CoreTime":
        return CoreTime(max(0.0, self.busy_s - earlier.busy_s), max(0.0, self.stolen_s - earlier.stolen_s))

    def with_stolen(self, cpu_s: float) -> float:
        """`cpu_s` used since then, plus a share of the stolen time: the same as their share of the work."""
        since = core_time() - self
        busy_s = max(since.busy_s, cpu_s)  # two clocks of the kernel
        return cpu_s + (since.stolen_s * cpu_s / busy_s if busy_s > 0 else 0.0)


def core_time() -> CoreTime:
    """Core time of this machine; zeros if the kernel does not report it.

    Source: psutil.cpu_times, /proc/stat on Linux.
    """
    try:
        times = psutil.cpu_times()
    except (OSError, ValueError):  # a container that hides them
        return CoreTime(0.0, 0.0)
    busy_s = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    return CoreTime(busy_s, getattr(times, "steal", 0.0))
