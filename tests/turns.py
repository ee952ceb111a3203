"""Tests that measure run alone, even when pytest-xdist runs other tests two at a time."""

import contextlib
import fcntl
from pathlib import Path

import pytest


class Turns:
    """A plugin that runs tests marked `alone` or `cuda` with nothing beside them, not even cells of notebooks.

    Without pytest-xdist every test runs alone.
    """

    def __init__(self, folder: Path):
        self._door, self._room = folder / "door.lock", folder / "room.lock"
        self._turn, self._is_alone = contextlib.ExitStack(), False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's: a test's timeout excludes the wait
    def pytest_runtest_protocol(self, item, nextitem):
        if not self._is_alone:
            # A test that waits to be alone holds the door, so that none that shares can pass it.
            with _held(self._door, fcntl.LOCK_EX):
                self._turn.enter_context(_held(self._room, fcntl.LOCK_EX if _measures(item) else fcntl.LOCK_SH))
        # Keep the room between two such tests: else each would wait for a test of the other process.
        self._is_alone = _measures(item) and nextitem is not None and _measures(nextitem)
        try:
            return (yield)
        finally:
            if not self._is_alone:
                self._turn.close()


def _measures(item: pytest.Item) -> bool:
    return not item.get_closest_marker("skip") and any(item.get_closest_marker(name) for name in ("alone", "cuda"))


@contextlib.contextmanager
def _held(path: Path, how: int):
    with open(path, "a+") as file:
        fcntl.lockf(file, how)  # not flock: workers that a test forks would hold it
        yield


def register(config: pytest.Config) -> None:
    """Register the plugin in a worker of pytest-xdist; its locks lie in the temporary folder of the run."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(Path(config.option.basetemp).parent), "turns")
