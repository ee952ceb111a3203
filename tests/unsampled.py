"""`compare` without its sampler of memory, for tests of something else.

A process that has run hundreds of tests is large, and the kernel takes a good part of a second to add up its pages.
"""

from labkit.measure import timing


class NoMemory:
    """Stands in for `PeakMemory`."""

    def __enter__(self) -> "NoMemory":
        return self

    def __exit__(self, *exc_info) -> None:
        pass

    def begin(self) -> None:
        pass

    now = begin

    def end(self) -> float:
        return float("nan")


def leave_memory_out(patch) -> None:
    patch.setattr(timing, "PeakMemory", NoMemory)
