"""A process of its own for each loader of a comparison.

A loader that crashes, hangs or changes global settings then does so alone, and its memory and CPU time are its own: the
workers that another loader keeps are not in them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

from labkit.measure import apart
from labkit.peers.peer import Peer, Work

TIMEOUT_S = 900.0  # for one answer: preparing a format, or a whole epoch
_PATIENCE_S = 10.0  # for a process to end by itself


class HostError(Exception):
    """What went wrong in a host, in one line."""


class Host:
    """A loader in a process of its own. A context manager; `ask` a command of `labkit.peers.serve`."""

    def __init__(self, peer: Peer, work: Work, *, timeout_s: float = TIMEOUT_S):
        import cloudpickle  # a loader may be written in a notebook's cell

        self._timeout_s = timeout_s
        self._pipe, theirs = Pipe()
        self._folder = tempfile.mkdtemp(prefix="labkit-peer-")  # for what a loader's workers leave when they are ended
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.peers.serve", str(theirs.fileno()), self._folder],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for us, who then close it
            )  # fmt: skip
        apart.add(self._process.pid)
        with contextlib.suppress(OSError):  # it died: `answer` will say so
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

    def hang_up(self) -> None:
        """Let the process end, without waiting for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process and all that it started."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also workers that it left behind
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        apart.discard(self._process.pid)

    def _receive(self) -> tuple[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._pipe.poll(1):
                if self._process.poll() is not None:  # its orphans may hold the pipe open
                    raise EOFError
                if time.monotonic() > deadline:
                    self._process.kill()
                    raise HostError(f"gave no answer for {self._timeout_s:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            raise HostError(self._how_it_died()) from None

    def _how_it_died(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_PATIENCE_S)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"its process ended {how}"
        return "its process no longer answers"


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
