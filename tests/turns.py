"""Tests that measure run alone, though pytest-xdist runs two of the others at once."""

import contextlib
from pathlib import Path

import pytest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Turns:
    """A plugin: what is marked `alone` or `cuda` has the machine to itself; notebooks' cells wait for it, too.

    Without pytest-xdist every test is alone; where the system has no file locks, none is.
    """

    def __init__(self, folder: Path):
        self._door, self._room = folder / "door.lock", folder / "room.lock"
        self._turn, self._is_alone = contextlib.ExitStack(), False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's: waiting is not part of a test
    def pytest_runtest_protocol(self, item, nextitem):
        if not self._is_alone:
            # Who waits to be alone waits in the door: nobody slips past who would only share.
            with _held(self._door, fcntl.LOCK_EX):
                self._turn.enter_context(_held(self._room, fcntl.LOCK_EX if _measures(item) else fcntl.LOCK_SH))
        # One after the other without a break: else each of them would wait for a test of the other process.
        self._is_alone = _measures(item) and nextitem is not None and _measures(nextitem)
        try:
            return (yield)
        finally:
            if not self._is_alone:
                self._turn.close()


def _measures(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("alone", "cuda"))


@contextlib.contextmanager
def _held(path: Path, how: int):
    with open(path, "a+") as file:  # closed: let go
        fcntl.lockf(file, how)  # not flock: workers forked by a test would hold it for as long as they live
        yield


def register(config: pytest.Config) -> None:
    """In a process of pytest-xdist; the folder is of this run, and goes with its temporary folders."""
    if fcntl is not None and hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent), "turns")
