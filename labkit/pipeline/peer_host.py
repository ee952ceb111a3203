"""A process of its own for each loader of a comparison.

A loader that crashes, hangs or changes global settings then does so alone, and its memory and CPU time are its own:
workers that another loader keeps are not in them. The process is no child of ours, so that sampling our process tree
costs nothing while another loader runs; it ends when its pipe does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

from labkit.pipeline.peer import Peer, Work

TIMEOUT_S = 900.0  # for one answer: preparing a format, or a whole epoch


class HostError(Exception):
    """What went wrong in a host, in one line."""


class Host:
    """A loader in a process of its own. A context manager; `ask` a command of `labkit.pipeline.peer_serve`."""

    def __init__(self, peer: Peer, work: Work, *, timeout_s: float = TIMEOUT_S):
        import cloudpickle  # a loader may be written in a notebook's cell

        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._pipe, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "labkit.pipeline.peer_serve", str(theirs.fileno())]
            output = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
            subprocess.run(command, pass_fds=[theirs.fileno()], check=True, **output)
        self._pid = self._pipe.recv()
        self._pipe.send(sys.path)
        self._pipe.send_bytes(cloudpickle.dumps((peer, work)))

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def ask(self, command: str) -> Any:
        """The result of a command, once it is done."""
        self.tell(command)
        return self.answer()

    def tell(self, command: str) -> None:
        with contextlib.suppress(OSError):  # it died: `answer` will say so
            self._pipe.send(command)

    def answer(self) -> Any:
        """The next answer.

        Raises:
            HostError: an exception there, a crash, or no answer in time.
        """
        status, value = self._receive()
        if status == "error":
            raise HostError(value)
        return value

    def close(self) -> None:
        """End the process and all that it started."""
        self._pipe.close()
        _wait_for_end(self._pid, 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._log.close()

    def _receive(self) -> tuple[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._pipe.poll(1):
                if time.monotonic() > deadline:
                    os.killpg(self._pid, signal.SIGKILL)
                    raise HostError(f"gave no answer for {self._timeout_s:.0f} s")
                if not _runs(self._pid):  # its orphans may hold the pipe open
                    raise EOFError
            return self._pipe.recv()
        except (EOFError, OSError):
            raise HostError(self._last_words()) from None

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        return f"its process died: {fatal[0]}" if fatal else "its process died without a word"


class HostedLoader:
    """Epochs of a hosted loader, for `compare`: iterating gives counts of images, the first batch's and the rest's.

    Attributes:
        cpu_s, peak_mem_mb, page_cache: Of the epoch just read, in the host's own process tree.
    """

    def __init__(self, host: Host, work: Work):
        self.batch_size, self.num_workers = work.batch_size, work.num_workers
        self._host, self._costs = host, None

    def __iter__(self) -> Iterator[int]:
        self._host.tell("epoch")
        self._host.answer()
        return self._counts()

    def _counts(self) -> Iterator[int]:
        yield self._host.answer()
        rest = self._host.answer()
        if rest:
            yield rest

    def __getattr__(self, name: str) -> Any:
        if name not in ("cpu_s", "peak_mem_mb", "page_cache"):
            raise AttributeError(name)
        if self._costs is None:
            self._costs = self._host.answer()
        return self._costs[name]


def _runs(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for_end(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
