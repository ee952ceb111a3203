"""Time that the host of a virtual machine gives to others: who would run then neither computes nor waits for data."""

import os
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


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

    Source: /proc/stat, first line, as in proc(5).
    """
    try:
        ticks = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    except (OSError, ValueError):
        return CoreTime(0.0, 0.0)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return CoreTime((user + nice + system + irq + softirq) * tick_s, steal * tick_s)
