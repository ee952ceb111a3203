"""A limit on the memory of one process and of the page cache that it fills: a control group of Linux, version 1."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path("/sys/fs/cgroup/memory")
_NAME = "labkit-bigger-than-memory"


class MemoryGroup:
    """A group below that of this process, for `run`; removed at the end of `with`.

    Args:
        limit_bytes: Of what its processes allocate and of the file pages that they bring into the page cache.

    Raises:
        OSError: no memory controller of version 1 here, or no right to make a group.
    """

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((path for _, names, path in (line.split(":", 2) for line in lines) if "memory" in names), None)
        if own is None:
            raise OSError("the memory of a process cannot be limited here: that needs control groups of version 1")
        self.path = _ROOT / own.strip("/") / f"{_NAME}-{os.getpid()}"

    def __enter__(self) -> "MemoryGroup":
        self.path.mkdir()
        (self.path / "memory.limit_in_bytes").write_text(str(self._limit_bytes))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for _ in range(50):  # the last process may still be ending
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)
        raise OSError(f"{self.path} is still in use")

    def run(self, function: Callable[[], Any], name: str) -> Any:
        """What `function` returns, called in a fork that has joined the group. What was loaded before does not count.

        Raises RuntimeError, with its `name`, if it raised, or if the kernel killed it for its memory.
        """
        context = get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=self._call, args=(function, there))
        process.start()
        there.close()
        try:
            found, error = here.recv()
        except EOFError:
            found, error = None, "it was killed: it may need more memory than the group has"
        finally:
            process.join()
        if error:
            raise RuntimeError(f"{name}: {error}")
        return found

    def _call(self, function: Callable[[], Any], there: Connection) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            there.send((function(), ""))
        except Exception as error:
            there.send((None, repr(error)))
