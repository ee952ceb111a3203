"""A host that takes cores away, as psutil tells of it."""

from types import SimpleNamespace


class Host:
    """What psutil tells, to be set: seconds in which the cores ran something, or were not let; and its own clock."""

    def __init__(self, clock=None):
        self.busy_s = self.stolen_s = 0.0
        self.clock = clock

    def passes(self, *, busy_s=0.0, stolen_s=0.0):
        self.busy_s, self.stolen_s = self.busy_s + busy_s, self.stolen_s + stolen_s

    def cpu_times(self):
        return SimpleNamespace(user=self.busy_s, nice=0.0, system=0.0, idle=77.0, iowait=88.0, steal=self.stolen_s)
