"""Processes that are killed at every moment at which they ask something of a disk."""

import itertools
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.truncate"}


def killed_at_every_moment(function: Callable[[], object]) -> Iterator[int]:
    """Run it in a fork that dies at its first moment, then in one that dies at its second, and so on.

    Yields the number of the moment after each kill; ends when a fork has reached its end.
    """
    for moment in itertools.count():
        child = multiprocessing.get_context("fork").Process(target=_run_until_killed, args=(function, moment))
        child.start()
        child.join(120)
        if child.exitcode == 0:
            return
        assert child.exitcode == -signal.SIGKILL
        yield moment


def _run_until_killed(function: Callable[[], object], moment: int) -> None:
    left = moment

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable) -> Callable:
        return lambda *arguments: (function(*arguments), count())[0]

    sys.addaudithook(lambda event, _: count() if event in _EVENTS else None)
    zlib.crc32, os.fsync = counted(zlib.crc32), counted(os.fsync)  # between two images of a pixel file; before a rename
    function()
    os._exit(0)
